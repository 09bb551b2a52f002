"""Parts that commands share: options and their parsing, guarded standard streams, tables, progress bars."""

import errno
import io
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TextIO

import typer
from typer import Argument, Option

from threefold.errors import CLOSED_OUTPUT, OutputLost, UserError
from threefold.files import parse_bytes, shown

if TYPE_CHECKING:
    from rich.table import Table

    from threefold.config import Config


ConfigFile = Annotated[Path, Argument(metavar="CONFIG", help="YAML file; docs/config.md lists the settings.")]
_NARROWEST: Final = 20  # columns
CUSTOM_MODEL: Final = "Your own model"
"""Group of options in help texts."""
Overrides = Annotated[
    list[str] | None, Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; may be repeated.")
]
ModelFile = Annotated[
    str | None,
    Option(
        "--model", metavar="FILE.py[:NAME]", help="Python file with a model of your own.", rich_help_panel=CUSTOM_MODEL
    ),
]
Average = Annotated[bool, Option("--average", help="Use the moving average of the weights (optimizer.ema_decay).")]
Step = Annotated[
    str | None,
    Option(
        "--step",
        metavar="N|best",
        help="Checkpoint to read: its step, or `best` (checkpoint.keep_best).",
        show_default="the newest",
    ),
]
TrustCode = Annotated[
    bool,
    Option(
        "--trust-code",
        help="Run the code that is stored in a checkpoint or named by a stored config.",
        rich_help_panel=CUSTOM_MODEL,
    ),
]
Overwrite = Annotated[bool, Option("--overwrite", help="Overwrite --out.")]
AsJson = Annotated[bool, Option("--json", help="Print a JSON document instead of a table.")]
RunFolder = Annotated[Path, Argument(metavar="RUN", help="Run folder.")]


def read_config(
    path: Path, overrides: Sequence[str] | None = None, model: str | None = None, trust_code: bool = False
) -> "Config":
    """Read the config of a command; raises as `load_config`, or if a stored config names code that is not trusted."""
    from threefold.config import load_config

    config = load_config(path, with_model(overrides, model))
    if not trust_code:
        from threefold.checkpoint.code import require_named_code

        require_named_code(config, path)
    return config


def with_model(overrides: Sequence[str] | None, model: str | None) -> list[str]:
    """Return a command's overrides and those that `--model` implies; raises as `model_file`."""
    file = model_file(model)
    custom = [] if file is None else ["model.architecture=own", f"model.file={json.dumps(file)}"]
    return [*(overrides or ()), *custom]


def model_file(model: str | None, named: str = "--model") -> str | None:
    """Return the value of `--model` (or what is `named`) with an absolute path, or None; raise a `UserError` if there
    is no such file.
    """
    if model is None:
        return None
    from threefold.config.model import split_model_file

    file, name = split_model_file(model, named)
    return f"{file}:{name}" if name else str(file)


def read_without_data(
    path: Path, overrides: Sequence[str] | None, model: str | None = None, trust_code: bool = False
) -> "Config":
    """Read and check a config as `read_config`, and resolve it without its data, which need not exist."""
    from threefold.config.resolve import check_settings

    given = read_config(path, overrides, model, trust_code)
    check_settings(given)
    from threefold.data.dataset import resolve_without_data

    return resolve_without_data(given)


def require_ranks(ranks: tuple[int, ...], config: "Config", option: str) -> None:
    """Raise a `UserError` unless the layout of a config has the ranks of an option, such as `--rank is`."""
    from threefold.comm.layout import Layout

    last = Layout.from_config(config.parallel).world_size - 1
    if absent := [rank for rank in ranks if not 0 <= rank <= last]:
        exist = f"the layout has ranks 0 to {last}" if last else "the layout has rank 0 alone"
        raise UserError(f"{option} {shown(str(absent[0]))} but {exist}; use {0 if absent[0] < 0 else last}.")


def print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)


def byte_size(text: str, option: str, example: str) -> int:
    """Parse an option as a size; raise a `UserError` if it is not one."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option} {error}; use {example}.") from None


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", whole: Collection[int] = (), **options: Any
) -> "Table":
    """Return a table of plain text whose cells are folded, not cut off, where they are too wide.

    Args:
        align: "l" or "r" per column; by default all but the first of more than two columns are right-aligned.
        whole: numbers of the columns whose cells are never folded.
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
    """Print a `table`; if it is wider than the terminal, with its columns close together, and the names of the first
    column, such as those of weights, folded at their dots."""
    from rich.console import Console
    from rich.measure import Measurement

    made, console = table(header, rows), Console()

    def excess() -> int:
        return Measurement.get(console, console.options.update(width=10**6), made).maximum - console.width

    if excess() > 0:
        made.padding = (0, 0)
    if (more := excess()) > 0:
        narrow = max(_NARROWEST, max((len(row[0]) for row in rows), default=0) - more)
        made = table(header, [(folded(row[0], narrow), *row[1:]) for row in rows], padding=(0, 0))
    console.print(made)


def folded(name: str, width: int) -> str:
    """Return a name in lines of at most a width, where the parts between its dots are short enough; text as it is."""
    if " " in name:
        return name
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if len(lines[-1] + part) <= width or not lines[-1].strip():
            lines[-1] += part
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def shortened(rows: Sequence[tuple[str, ...]], most: int = 24) -> Sequence[tuple[str, ...]]:
    """Return the rows, or the first and last of many."""
    if len(rows) <= most:
        return rows
    return [*rows[: most // 2], ("…",) * len(rows[0]), *rows[-most // 2 :]]


def setting_text(value: object) -> str:
    """Return the value of a setting as JSON; a dash for None, a setting without a value."""
    return "–" if value is None else json.dumps(value, ensure_ascii=False)


def first_to_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


class Bars:
    """Progress bars of long work on the terminal, one per phase; nothing is shown before the first."""

    def __init__(self) -> None:
        from rich import progress

        name, times = progress.TextColumn("{task.description:<24}"), progress.TimeElapsedColumn()
        columns = (name, progress.BarColumn(), progress.DownloadColumn(), times, progress.TimeRemainingColumn())
        self._bars = progress.Progress(*columns)

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


def guard_streams() -> None:
    """Open closed standard streams on /dev/null, and raise `OutputLost` when standard output cannot be written.

    A character that the output's encoding lacks is written as its escape, unless the user chose otherwise.
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
        if errors in (None, "strict", "surrogateescape"):  # what Python chooses; they fail at such a character
            errors = "backslashreplace"
        raw = _Output(1, "w", closefd=False)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=raw.isatty())


def forget_narrow_terminal() -> None:
    """Unset COLUMNS, the width of a terminal, where it is too small for any table, which would lose its cells.

    Some shells and job systems set it to 0 without a terminal.
    """
    with suppress(ValueError, KeyError):
        if int(os.environ["COLUMNS"]) < _NARROWEST:
            del os.environ["COLUMNS"]


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
