"""`threefold data show` and `threefold data verify`: the contents of token files."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from threefold.doors import needed
from threefold.files import first_of, format_bytes
from threefold.terminal import Bars, print_table

if TYPE_CHECKING:
    from threefold.data.corpus import Corpus, StoredTokens
    from threefold.data.formats.threefold_folder import TokenFiles
    from threefold.output import Progress
    from threefold.report.tokens import TokenSummary

Facts = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Header and rows of a table."""


def token_facts(files: "TokenFiles", progress: "Progress") -> Facts:
    """Return what there is to say about token files, after a look at every token."""
    from threefold.report.tokens import summarize

    stored = files.stored()
    return _facts(stored, summarize(stored, progress), files)


def show(
    path: Path = Argument(
        ..., metavar="PATH", help="Token files, as data.path: a folder, a prefix or one of the files."
    ),
    tokenizer: Path | None = Option(None, help="A tokenizer.json to decode files that have none of their own."),
    split: str = Option("949,50,1", help="Weights of train, valid and test, as data.split."),
    sequence_length: int = Option(256, help="Tokens per sample, as data.sequence_length."),
) -> None:
    """Show the contents of token files of any system, and their first training sample as text.

    Examples:
      threefold data show tokens
    """
    import numpy as np

    from threefold.data.formats.registry import open_corpus, read_stored
    from threefold.data.packed import PackedSamples
    from threefold.data.tokenizer import load_tokenizer
    from threefold.report.tokens import split_facts, summarize

    if tokenizer is not None:
        load_tokenizer(tokenizer)
    stored = read_stored(path)
    with Bars() as bars:
        summary = summarize(stored, bars)
    corpus = open_corpus(path, tokenizer=tokenizer, vocab_size=summary.highest + 1)
    if summary.highest >= corpus.vocab_size:
        raise corpus.outside(summary.highest, summary.highest_place)
    print_table(*_facts(stored, summary, corpus))
    if corpus.holds_chat:
        _show_conversations(corpus, split, sequence_length)
        return
    samples = PackedSamples.open(corpus, "train", split, sequence_length)
    facts = split_facts(corpus, split, sequence_length)
    rows = [(fact.name, f"{fact.documents:,}", f"{fact.tokens:,}", f"{fact.samples:,}") for fact in facts]
    print_table(("split", "documents", "tokens", f"samples of {sequence_length}"), rows)
    typer.echo(f"Sample 0 of the training split ({sequence_length} tokens and the last label):\n")
    typer.echo(_decode(corpus, samples.read(np.array([0]))[0].tolist()))


def verify(
    paths: list[Path] = Argument(
        ..., metavar="PATH", help="Token files of any system, JSON lines with their cache, or a folder of that cache."
    ),
    tokenizer: Path | None = Option(
        None, help="A tokenizer.json whose vocabulary bounds the tokens of files that have none of their own."
    ),
) -> None:
    """Read token files completely and compare them with the checksums written with them."""
    from threefold.errors import UserError
    from threefold.report.tokens import audit

    with Bars() as bars:
        audits = [each for path in paths for each in audit(path, tokenizer, bars)]
    rows = []
    for one in audits:
        size = "" if one.bytes is None else format_bytes(one.bytes)
        rows.append((str(one.path), size, "damaged" if one.problem else one.found))
    print_table(("file", "size", "found"), rows)
    if damaged := [one.problem for one in audits if one.problem]:
        more = f" ({len(damaged) - 1} more of the files are damaged, as the table says)" if len(damaged) > 1 else ""
        raise UserError(f"{damaged[0].rstrip('.')}{more}")


def _facts(stored: "StoredTokens", summary: "TokenSummary", corpus: "Corpus") -> Facts:
    from threefold.data.formats.threefold_folder import TokenFiles

    tokens, documents, sequences = len(stored.tokens), summary.documents, len(stored.sequences) - 1
    vocabulary = f"{corpus.vocab_size:,} tokens"
    if corpus.tokenizer is None:
        vocabulary = f"unknown without a tokenizer; the highest token is {summary.highest:,}"
    if corpus.eod is None:
        end = f"unknown; {summary.common_share:.0%} of the documents end with token {summary.common_end}"
    else:
        name = "" if corpus.tokenizer is None else corpus.tokenizer.id_to_token(corpus.eod)
        end = f"token {corpus.eod} {name}".strip()
    rows: list[tuple[str, ...]] = [
        ("format", stored.format),
        ("documents", f"{documents:,}" + (f", of {sequences:,} sequences" if sequences != documents else "")),
        ("longest document", f"{summary.longest:,} tokens (document {summary.longest_document:,})"),
        ("empty documents", f"{summary.empty:,}"),
        ("tokens", f"{tokens:,} ({tokens / documents:,.0f} a document)"),
        ("stored as", f"{stored.tokens.dtype.name}, {format_bytes(stored.tokens.nbytes)}"),
        ("vocabulary", vocabulary),
        ("end of document", end),
    ]
    if isinstance(corpus, TokenFiles):
        meta, begins, tokenizer = corpus.meta, "", corpus.tokenizer
        if meta.text_bytes:
            rows.append(
                ("text", f"{format_bytes(meta.text_bytes)} ({meta.text_bytes / meta.tokens:.2f} bytes a token)")
            )
        if meta.beginning:
            names = ((tokenizer and tokenizer.id_to_token(token)) or str(token) for token in meta.beginning)
            begins = f"; each text begins with {' '.join(names)}"
        read = {"parse": "parsed", "text": "read as text"}[meta.special_tokens]
        rows.append(("special tokens", f"{read} in text{begins}"))
        if corpus.loss_mask is not None:
            counted = int(corpus.loss_mask[: meta.tokens].sum(dtype="int64"))
            share = f"({counted / meta.tokens:.0%}), those of the answers"
            rows.append(("count for the loss", f"{counted:,} tokens {share}"))
        rows.append(("made from", first_of((source.name for source in meta.sources), 3, "files")))
    rows += [("note", note) for note in stored.notes]
    return (str(stored.path), ""), rows


def _show_conversations(corpus: "Corpus", split: str, sequence_length: int) -> None:
    """Print the splits, and the first sample with its learned tokens between ⟦ and ⟧, in color if possible."""
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from threefold.constants import IGNORE_INDEX
    from threefold.data.samples import SPLITS, document_runs

    packed_conversations = needed("packed_conversations", "Data of conversations", "huggingface")
    called, size = "conversations", 1
    if corpus.holds_pairs:
        packed_conversations = needed("preference_pairs", "Data of preferences", "preference")
        called, size = "pairs", 2
    rows: list[tuple[str, ...]] = []
    for name in SPLITS:
        if len(document_runs(corpus.document_count // size, split, name)):
            packed = packed_conversations.open(corpus, name, split, sequence_length)
            rows.append((name, f"{packed.documents_read:,}", f"{packed.longer:,}", f"{len(packed):,}"))
    header = ("split", called, f"longer than {sequence_length}", f"samples of {sequence_length}")
    print_table(header, rows)
    samples = packed_conversations.open(corpus, "train", split, sequence_length)
    for note in samples.notes:
        typer.echo(note)
    typer.echo("\nSample 0 of the training split:\n")
    first = np.array([0])
    tokens, labels = (part[0].tolist() for part in samples.labelled(first))
    documents = samples.documents(first)[0].tolist()
    whole = [*tokens, labels[-1]]
    counted = [False, *(label != IGNORE_INDEX for label in labels)]
    console = Console(highlight=False)
    for number in sorted(set(documents)):
        places = [place for place, document in enumerate(documents) if document == number]
        if number == documents[-1] and labels[-1] != IGNORE_INDEX:
            places.append(len(documents))
        if not any(counted[place] for place in places):
            continue  # padding
        title = ("chosen", "rejected")[number] if corpus.holds_pairs else f"conversation {number + 1}"
        shown = Text(f"{title}\n", style="dim")
        for counts, run in groupby(places, key=counted.__getitem__):
            text = _decode(corpus, [whole[place] for place in run])
            shown.append(f"⟦{text}⟧" if counts else text, style="bold green" if counts else "default not bold not dim")
        console.print(shown, end="\n\n", soft_wrap=True)
    learned = sum(counted)
    console.print(f"Tokens in ⟦…⟧ have labels: {learned:,} of {len(labels):,}; all others are ignored.", soft_wrap=True)


def _decode(corpus: "Corpus", tokens: list[int]) -> str:
    """Decode tokens, including special ones; without a tokenizer, return their ids."""
    if corpus.tokenizer is None:
        return " ".join(map(str, tokens))
    from threefold.data.tokenizer import decoded

    return decoded(corpus.tokenizer, tokens)
