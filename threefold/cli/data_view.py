"""What `threefold data` prints: tables of token files, and progress."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from threefold.data.audit import Audit
    from threefold.data.convert import Converted
    from threefold.data.corpus import Corpus, StoredTokens
    from threefold.data.files import TokenFiles
    from threefold.data.summary import Summary


class Bars:
    """The progress of long work as bars on the terminal, one a phase; nothing is shown before the first."""

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


def print_facts(stored: "StoredTokens", summary: "Summary", corpus: "Corpus") -> None:
    """The table of what token files hold; the vocabulary is the highest token's where the corpus has no tokenizer."""
    from threefold.data.files import TokenFiles

    tokens, documents, sequences = len(stored.tokens), summary.documents, len(stored.sequences) - 1
    rows = [
        ("format", stored.format),
        ("documents", f"{documents:,}" + (f", of {sequences:,} sequences" if sequences != documents else "")),
        ("longest document", f"{summary.longest:,} tokens (document {summary.longest_document:,})"),
        ("empty documents", f"{summary.empty:,}"),
        ("tokens", f"{tokens:,} ({tokens / documents:,.0f} a document)"),
        ("stored as", f"{stored.tokens.dtype.name}, {size(stored.tokens.nbytes)}"),
        ("vocabulary", _vocabulary(corpus, summary)),
        ("end of document", _end(corpus, summary)),
        *(_made_from(corpus) if isinstance(corpus, TokenFiles) else ()),
        *(("note", note) for note in stored.notes),
    ]
    print_table((str(stored.path), ""), rows)


def _vocabulary(corpus: "Corpus", summary: "Summary") -> str:
    if corpus.tokenizer is None:
        return f"unknown without a tokenizer; the highest token is {summary.highest:,}"
    return f"{corpus.vocab_size:,} tokens"


def _end(corpus: "Corpus", summary: "Summary") -> str:
    if corpus.eod is not None:
        name = corpus.tokenizer.id_to_token(corpus.eod) if corpus.tokenizer is not None else ""
        return f"token {corpus.eod} {name}".strip()
    return f"unknown; {summary.common_share:.0%} of the documents end with token {summary.common_end}"


def _made_from(files: "TokenFiles") -> list[tuple[str, str]]:
    meta = files.meta
    named = ", ".join(source.name for source in meta.sources[:3])
    sources = named if len(meta.sources) <= 3 else f"{named} and {len(meta.sources) - 3} more files"
    text = [("text", f"{size(meta.text_bytes)} ({meta.text_bytes / meta.tokens:.2f} bytes a token)")]
    return [*(text if meta.text_bytes else []), ("made from", sources)]


def print_sample(corpus: "Corpus", tokens: list[int]) -> None:
    """Tokens as text, or as they are where there is no tokenizer."""
    if corpus.tokenizer is None:
        typer.echo(" ".join(map(str, tokens)))
    else:
        typer.echo(corpus.tokenizer.decode(tokens, skip_special_tokens=False))


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A plain table; numbers stand right where there are more columns than two."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="right" if i and len(header) > 2 else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_audits(audits: "list[Audit]") -> None:
    """A table of files that were checked: what each holds, and how it was found."""
    rows: list[tuple[str, ...]] = [
        (str(one.path), "" if one.bytes is None else size(one.bytes), "damaged" if one.problem else one.found)
        for one in audits
    ]
    print_table(("file", "size", "found"), rows)


def print_converted(source: Path, out: Path, converted: "Converted") -> None:
    """One line about a conversion, and one for each thing that could not stay as it was."""
    typer.echo(f"Wrote {converted.documents:,} documents, {converted.tokens:,} tokens, from {source} to {out}.")
    if converted.left_out:
        typer.echo(f"Left out {converted.left_out:,} empty documents, which this format does not have.")
    if converted.ended:
        typer.echo(f"Gave {converted.ended:,} documents the end-of-document token that this format asks for.")


def size(count: int) -> str:
    """So many bytes, in the unit that fits."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} bytes"
