"""What commands share at the terminal: guarded standard streams, tables, progress bars, and counts in words."""

import errno
import io
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from threefold.errors import CLOSED_OUTPUT, OutputLost, UserError

if TYPE_CHECKING:
    from rich.table import Table

_UNBOUNDED: Final = 10**6


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", whole: Collection[int] = (), **options: Any
) -> "Table":
    """Return a table of plain text whose cells are folded, not cut off, where they are too wide.

    Args:
        header: names of the columns.
        rows: cells of each row.
        align: "l" or "r" per column; by default all but the first of more than two columns are right-aligned.
        whole: numbers of the columns whose cells are never folded.
        options: further arguments of rich's `Table`.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(**{"box": box.SIMPLE, **options})
    for number, name in enumerate(header):
        right = align[number] == "r" if align else number > 0 and len(header) > 2
        made.add_column(Text(name), justify="right" if right else "left", overflow="fold", no_wrap=number in whole)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a `table`, with its columns close together if it is wider than the terminal."""
    from rich.console import Console
    from rich.measure import Measurement

    made, console = table(header, rows), Console()
    if Measurement.get(console, console.options.update(width=_UNBOUNDED), made).maximum > console.width:
        made.padding = (0, 0)
    console.print(made)


def counted(count: int, thing: str, plural: str = "s") -> str:
    """Return a number of things, such as `1 rank` or `1,024 ranks`."""
    return f"{count:,} {thing}{plural if count != 1 else ''}"


def first_to_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def phase(self, name: str, total_bytes: int) -> None:
        self._bars.start()
        self._task = self._bars.add_task(name, total=total_bytes)

    def advance(self, read_bytes: int) -> None:
        self._bars.advance(self._task, read_bytes)


class Steps:
    """Transient progress bar on standard error; hidden if that is not a terminal.

    Args:
        doing: text before the bar, such as `Measuring`.
        total: number of steps, if it is known before the first.
        shown: whether to show the bar.
    """

    def __init__(self, doing: str, total: int | None = None, *, shown: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._doing = doing
        self._bars = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            auto_refresh=False,  # no thread, because processes should not be forked beside one
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bars.add_task(doing if total else "", total=total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def advance(self, steps: int = 1) -> None:
        self._bars.update(self._task, advance=steps, refresh=True)

    def tell(self, part: str, done: int, parts: int) -> None:
        """Show the current part and how many parts are done."""
        self._bars.update(self._task, description=f"{self._doing} {part}", completed=done, total=parts, refresh=True)


def guard_streams() -> None:
    """Open closed standard streams on /dev/null, and raise `OutputLost` when standard output cannot be written.

    Otherwise the next file to be opened would reuse a closed descriptor, and output would go into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        stream: TextIO | None = sys.stdout
        encoding, errors = ("utf-8", None) if stream is None else (stream.encoding, stream.errors)
        raw = _Output(1, "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=raw.isatty()
        )


def read_standard_input() -> str:
    """Read all of standard input as UTF-8, whatever the locale; raise a `UserError` if it is not UTF-8."""
    source = getattr(sys.stdin, "buffer", None)
    if source is None:
        return sys.stdin.read()
    content: bytes = source.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Standard input is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); convert it first, "
            "for example with `iconv -f latin1 -t utf-8`."
        ) from None


class _Output(io.FileIO):
    """Descriptor 1; raises at the first failure and drops later output."""

    _lost = False

    def write(self, data: Any) -> int:
        if self._lost:
            return len(memoryview(data))
        try:
            return os.write(1, data)
        except OSError as error:
            self._lost = True
            if error.errno == errno.EPIPE:
                raise OutputLost(CLOSED_OUTPUT) from None
            raise OutputLost(f"Standard output cannot be written ({error.strerror}).") from None
