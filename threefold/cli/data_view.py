"""Output of `threefold data`: tables of token files, and progress bars."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from threefold.byte_sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from threefold.data.audit import Audit, TokenSummary
    from threefold.data.corpus import Corpus, StoredTokens
    from threefold.data.formats.threefold_folder import TokenFiles
    from threefold.data.preparation import ConvertedTokens


_UNBOUNDED: Final = 10**6


class Bars:
    """Progress bars of long work on the terminal, one per phase; nothing is shown before the first."""

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        name = TextColumn("{task.description:<24}")
        self._bars = Progress(name, BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn())

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def phase(self, name: str, total_bytes: int) -> None:
        self._bars.start()
        self._task = self._bars.add_task(name, total=total_bytes)

    def advance(self, read_bytes: int) -> None:
        self._bars.advance(self._task, read_bytes)


def print_facts(stored: "StoredTokens", summary: "TokenSummary", corpus: "Corpus") -> None:
    """Print a table of what token files hold, with the highest token if no tokenizer gives the vocabulary."""
    from threefold.data.formats.threefold_folder import TokenFiles

    tokens, documents, sequences = len(stored.tokens), summary.documents, len(stored.sequences) - 1
    rows = [
        ("format", stored.format),
        ("documents", f"{documents:,}" + (f", of {sequences:,} sequences" if sequences != documents else "")),
        ("longest document", f"{summary.longest:,} tokens (document {summary.longest_document:,})"),
        ("empty documents", f"{summary.empty:,}"),
        ("tokens", f"{tokens:,} ({tokens / documents:,.0f} a document)"),
        ("stored as", f"{stored.tokens.dtype.name}, {format_bytes(stored.tokens.nbytes)}"),
        ("vocabulary", _vocabulary(corpus, summary)),
        ("end of document", _end(corpus, summary)),
        *(_made_from(corpus) if isinstance(corpus, TokenFiles) else ()),
        *(("note", note) for note in stored.notes),
    ]
    print_table((str(stored.path), ""), rows)


def _vocabulary(corpus: "Corpus", summary: "TokenSummary") -> str:
    if corpus.tokenizer is None:
        return f"unknown without a tokenizer; the highest token is {summary.highest:,}"
    return f"{corpus.vocab_size:,} tokens"


def _end(corpus: "Corpus", summary: "TokenSummary") -> str:
    if corpus.eod is not None:
        name = corpus.tokenizer.id_to_token(corpus.eod) if corpus.tokenizer is not None else ""
        return f"token {corpus.eod} {name}".strip()
    return f"unknown; {summary.common_share:.0%} of the documents end with token {summary.common_end}"


def _made_from(files: "TokenFiles") -> list[tuple[str, str]]:
    meta = files.meta
    named = ", ".join(source.name for source in meta.sources[:3])
    sources = named if len(meta.sources) <= 3 else f"{named} and {len(meta.sources) - 3} more files"
    text = [("text", f"{format_bytes(meta.text_bytes)} ({meta.text_bytes / meta.tokens:.2f} bytes a token)")]
    read = {"parse": "parsed", "text": "read as text"}[meta.special_tokens]
    begins = f"; each text begins with {_names(files, meta.beginning)}" if meta.beginning else ""
    rows = [*(text if meta.text_bytes else []), ("special tokens", f"{read} in text{begins}")]
    if files.loss_mask is not None:
        counted = int(files.loss_mask[: meta.tokens].sum(dtype="int64"))
        rows.append(("count for the loss", f"{counted:,} tokens ({counted / meta.tokens:.0%}), those of the answers"))
    return [*rows, ("made from", sources)]


def _names(corpus: "Corpus", tokens: "tuple[int, ...]") -> str:
    found = (corpus.tokenizer and corpus.tokenizer.id_to_token(token) for token in tokens)
    return " ".join(name or str(token) for name, token in zip(found, tokens, strict=True))


def print_labelled(corpus: "Corpus", tokens: list[int], labels: list[int], documents: list[int]) -> None:
    """Print a sample of conversations, with the tokens that have labels between ⟦ and ⟧, and in color if possible.

    Args:
        corpus: corpus with a known tokenizer.
        tokens, labels: tokens and labels of the sample.
        documents: index in the sample of each token's document.
    """
    from rich.console import Console
    from rich.text import Text

    from threefold.constants import IGNORE_INDEX

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
        for counts, run in _runs(places, counted):
            text = decode(corpus, [whole[place] for place in run])
            shown.append(f"⟦{text}⟧" if counts else text, style="bold green" if counts else "default not bold not dim")
        console.print(shown, end="\n\n", soft_wrap=True)
    learned = sum(counted)
    console.print(f"Tokens in ⟦…⟧ have labels: {learned:,} of {len(labels):,}; all others are ignored.", soft_wrap=True)


def _runs(places: list[int], counted: list[bool]) -> "Iterator[tuple[bool, list[int]]]":
    from itertools import groupby

    for counts, run in groupby(places, key=lambda place: counted[place]):
        yield counts, list(run)


def decode(corpus: "Corpus", tokens: list[int]) -> str:
    """Decode tokens, including special ones; without a tokenizer, return their ids."""
    if corpus.tokenizer is None:
        return " ".join(map(str, tokens))
    return str(corpus.tokenizer.decode(tokens, skip_special_tokens=False))


def print_sample(corpus: "Corpus", tokens: list[int]) -> None:
    typer.echo(decode(corpus, tokens))


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a plain table without truncation; with more than two columns, numbers are right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="right" if i and len(header) > 2 else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if Measurement.get(console, console.options.update(width=_UNBOUNDED), table).maximum > console.width:
        table.padding = (0, 0)
    console.print(table)


def print_audits(audits: "list[Audit]") -> None:
    rows: list[tuple[str, ...]] = [
        (str(one.path), "" if one.bytes is None else format_bytes(one.bytes), "damaged" if one.problem else one.found)
        for one in audits
    ]
    print_table(("file", "size", "found"), rows)


def print_converted(source: Path, out: Path, converted: "ConvertedTokens") -> None:
    """Print a line about a conversion, and one for each thing that could not stay the same."""
    typer.echo(f"Wrote {converted.documents:,} documents, {converted.tokens:,} tokens, from {source} to {out}.")
    if converted.left_out:
        typer.echo(f"Left out {converted.left_out:,} empty documents, which this format does not have.")
    if converted.ended:
        typer.echo(f"Gave {converted.ended:,} documents the end-of-document token that this format requires.")
