"""`threefold data`: text to token files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from threefold.data.files import TokenFiles

app = typer.Typer(help="Make token files from text, and look into them.", no_args_is_help=True)


@app.command()
def sample(directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to.")]) -> None:
    """Write a few MB of real English, which every Python carries, as JSON lines."""
    from threefold.data.python_text import write_sample

    summary = write_sample(directory)
    typer.echo(f"Wrote {summary.documents:,} documents, {summary.bytes / 1e6:.1f} MB of English text:")
    for file in summary.files:
        typer.echo(f"  {file}")
    typer.echo(f"Next: threefold data prepare {directory} --out TOKENS")


@app.command()
def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT", help="Files or folders: .jsonl, .json, .txt, also as .gz or .zst."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to make.", metavar="DIR")],
    vocab_size: Annotated[int, typer.Option(help="Tokens of the byte-level BPE that is learned from the text.")] = 8192,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to use instead of learning one.")] = None,
    eod: Annotated[
        str | None, typer.Option(help="End-of-document token of --tokenizer, if its name is unusual.")
    ] = None,
    key: Annotated[str, typer.Option(help="Key of a JSON line that holds the text.")] = "text",
    workers: Annotated[int | None, typer.Option(help="Processes that encode.", show_default="one per core")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace token files that stand at --out.")] = False,
) -> None:
    """Turn text into token files that `data.path` of a run can name."""
    import os

    from threefold.data.prepare import Request
    from threefold.data.prepare import prepare as prepare_files

    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    request = Request(tuple(inputs), out, vocab_size, tokenizer, eod, key, workers, overwrite)
    with _Bars() as bars:
        files = prepare_files(request, bars)
    _print_facts(files)


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder made by `threefold data prepare`.")],
    split: Annotated[str, typer.Option(help="Weights of train, valid and test, as data.split.")] = "949,50,1",
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sample, as data.sequence_length.")] = 256,
) -> None:
    """Show what a folder of token files holds, and its first training sample as text."""
    import numpy as np

    from threefold.data.files import TokenFiles
    from threefold.data.samples import PackedSamples, split_facts

    files = TokenFiles.open(directory)
    _print_facts(files)
    samples = PackedSamples.open(files, "train", split, sequence_length)
    _print_table(
        ("split", "documents", "tokens", f"samples of {sequence_length}"),
        [
            (fact.name, f"{fact.documents:,}", f"{fact.tokens:,}", f"{fact.samples:,}")
            for fact in split_facts(files, split, sequence_length)
        ],
    )
    typer.echo(f"Sample 0 of the training split ({sequence_length} tokens and the last label):\n")
    tokenizer = files.tokenizer
    assert tokenizer is not None
    typer.echo(tokenizer.decode(samples.read(np.array([0]))[0].tolist(), skip_special_tokens=False))


class _Bars:
    """The progress of `prepare` as bars on the terminal, one a phase; nothing is shown before the first."""

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

    def __enter__(self) -> "_Bars":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def phase(self, name: str, total_bytes: int) -> None:
        self._bars.start()
        self._task = self._bars.add_task(name, total=total_bytes)

    def advance(self, read_bytes: int) -> None:
        self._bars.advance(self._task, read_bytes)


def _print_facts(files: "TokenFiles") -> None:
    meta = files.meta
    size = meta.tokens * files.tokens.itemsize
    _print_table(
        (str(files.path), ""),
        [
            ("documents", f"{meta.documents:,}"),
            ("tokens", f"{meta.tokens:,} ({meta.tokens / meta.documents:,.0f} a document)"),
            ("stored as", f"{meta.dtype}, {_size(size)}"),
            ("text", f"{_size(meta.text_bytes)} ({meta.text_bytes / meta.tokens:.2f} bytes a token)"),
            ("vocabulary", f"{meta.vocab_size:,} tokens"),
            ("end of document", f"token {meta.eod} {files.tokenizer and files.tokenizer.id_to_token(meta.eod)}"),
            ("made from", _sources(files)),
        ],
    )


def _sources(files: "TokenFiles") -> str:
    sources = files.meta.sources
    named = ", ".join(source.name for source in sources[:3])
    return named if len(sources) <= 3 else f"{named} and {len(sources) - 3} more files"


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
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


def _size(size: int) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size} bytes"
