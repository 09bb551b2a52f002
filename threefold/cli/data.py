"""`threefold data`: prepare, show, verify and convert token files."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from typer import Argument, Option

from threefold.command_line import CommandLine
from threefold.files import first_of, format_bytes
from threefold.host import usable_cores
from threefold.terminal import Bars, print_table

if TYPE_CHECKING:
    from threefold.data.audit import TokenSummary
    from threefold.data.corpus import Corpus, StoredTokens

app = CommandLine(help="Prepare token files from text; show, verify and convert them.")


@app.command()
def sample(directory: Path = Argument(..., metavar="DIR", help="Folder to write to.")) -> None:
    """Write a few MB of English text, from the documentation in Python's standard library, as JSON Lines.

    Examples:
      threefold data sample text
    """
    from threefold.data.python_text import write_sample

    summary = write_sample(directory)
    typer.echo(f"Wrote {summary.documents:,} documents, {summary.bytes / 1e6:.1f} MB of English text:")
    for file in summary.files:
        typer.echo(f"  {file}")
    typer.echo(f"Next: threefold data prepare {directory} --out TOKENS")


@app.command()
def prepare(
    inputs: list[Path] = Argument(
        ..., metavar="INPUT", help="Files or folders: .jsonl, .json, .txt, also as .gz or .zst, and .parquet."
    ),
    out: Path = Option(..., help="Folder to make.", metavar="DIR"),
    vocab_size: int = Option(
        8192, max=2**21, help="Vocabulary size of the byte-level BPE that is learned from the text."
    ),
    tokenizer: Path | None = Option(None, help="A tokenizer.json to use instead of learning one."),
    eod: str | None = Option(None, help="End-of-document token of --tokenizer, if its name is unusual."),
    key: str = Option(
        "text", help="Key of a JSON line, or column of a parquet file, that holds the text, or messages."
    ),
    workers: int | None = Option(None, max=256, help="Number of encoding processes.", show_default="one per core"),
    special_tokens: Literal["parse", "text"] = Option(
        "parse",
        help="Whether text that spells a special token becomes that token (parse) or stays text "
        "(text), as untrusted text should.",
    ),
    chat_template: Path | None = Option(
        None, help="Chat template of conversations: .jinja or tokenizer_config.json.", show_default="beside --tokenizer"
    ),
    overwrite: bool = Option(False, "--overwrite", help="Overwrite token files at --out."),
) -> None:
    """Encode text into token files for `data.path` of a run.

    Examples:
      threefold data prepare text --out tokens --vocab-size 4096
      threefold data prepare chats.jsonl --out tokens --tokenizer tokenizer.json
    """
    from threefold.data.audit import summarize
    from threefold.data.preparation import prepare as prepare_files

    workers = usable_cores() if workers is None else workers
    choices = (vocab_size, tokenizer, eod, key, workers, overwrite, special_tokens, chat_template)
    with Bars() as bars:
        files = prepare_files(inputs, out, *choices, bars)
        stored = files.stored()
        summary = summarize(stored, bars)
    _print_facts(stored, summary, files)


@app.command()
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

    from threefold.data.audit import summarize
    from threefold.data.formats.registry import open_corpus, read_stored
    from threefold.data.packed import PackedSamples, split_facts
    from threefold.data.tokenizer import load_tokenizer

    if tokenizer is not None:
        load_tokenizer(tokenizer)
    stored = read_stored(path)
    with Bars() as bars:
        summary = summarize(stored, bars)
    corpus = open_corpus(path, tokenizer=tokenizer, vocab_size=summary.highest + 1)
    if summary.highest >= corpus.vocab_size:
        raise corpus.outside(summary.highest, summary.highest_place)
    _print_facts(stored, summary, corpus)
    if corpus.holds_chat:
        _show_conversations(corpus, split, sequence_length)
        return
    samples = PackedSamples.open(corpus, "train", split, sequence_length)
    facts = split_facts(corpus, split, sequence_length)
    rows = [(fact.name, f"{fact.documents:,}", f"{fact.tokens:,}", f"{fact.samples:,}") for fact in facts]
    print_table(("split", "documents", "tokens", f"samples of {sequence_length}"), rows)
    typer.echo(f"Sample 0 of the training split ({sequence_length} tokens and the last label):\n")
    typer.echo(_decode(corpus, samples.read(np.array([0]))[0].tolist()))


@app.command()
def verify(
    paths: list[Path] = Argument(
        ..., metavar="PATH", help="Token files of any system, JSON lines with their cache, or a folder of that cache."
    ),
    tokenizer: Path | None = Option(
        None, help="A tokenizer.json whose vocabulary bounds the tokens of files that have none of their own."
    ),
) -> None:
    """Read token files completely and compare them with the checksums written with them."""
    from threefold.data.audit import audit
    from threefold.errors import UserError

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


@app.command()
def convert(
    source: Path = Argument(
        ..., metavar="SOURCE", help="Token files of any system: a folder, a prefix or one of the files."
    ),
    to: str = Option(
        ..., metavar="FORMAT", help="Format to write: megatron or threefold, or one that an installed package adds."
    ),
    out: Path = Option(..., help="Prefix of the .bin and .idx files to make, or the folder.", metavar="OUT"),
    tokenizer: Path | None = Option(
        None, help="With --to threefold: a tokenizer.json for files that have none of their own."
    ),
    eod: str | None = Option(
        None, help="With --to threefold: end-of-document token of the tokenizer, if its name is unusual."
    ),
    overwrite: bool = Option(False, "--overwrite", help="Overwrite --out."),
) -> None:
    """Convert token files to the format of another system, token for token.

    Examples:
      threefold data convert tokens --to megatron --out corpus_text_document
    """
    from threefold.data.preparation import convert as convert_tokens

    with Bars() as bars:
        converted = convert_tokens(source, to, out, tokenizer, eod, overwrite, bars)
    typer.echo(f"Wrote {converted.documents:,} documents, {converted.tokens:,} tokens, from {source} to {out}.")
    if converted.left_out:
        typer.echo(f"Left out {converted.left_out:,} empty documents, which this format does not have.")
    if converted.ended:
        typer.echo(f"Gave {converted.ended:,} documents the end-of-document token that this format requires.")


def _print_facts(stored: "StoredTokens", summary: "TokenSummary", corpus: "Corpus") -> None:
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
    rows = [
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
    print_table((str(stored.path), ""), rows)


def _show_conversations(corpus: "Corpus", split: str, sequence_length: int) -> None:
    """Print the splits, and the first sample with its learned tokens between ⟦ and ⟧, in color if possible."""
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from threefold.constants import IGNORE_INDEX
    from threefold.data.packed import PackedConversations
    from threefold.data.samples import SPLITS, document_runs

    rows: list[tuple[str, ...]] = []
    for name in SPLITS:
        if len(document_runs(corpus.document_count, split, name)):
            packed = PackedConversations.open(corpus, name, split, sequence_length)
            rows.append((name, f"{packed.documents_read:,}", f"{packed.longer:,}", f"{len(packed):,}"))
    header = ("split", "conversations", f"longer than {sequence_length}", f"samples of {sequence_length}")
    print_table(header, rows)
    samples = PackedConversations.open(corpus, "train", split, sequence_length)
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
        shown = Text(f"conversation {number + 1}\n", style="dim")
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
