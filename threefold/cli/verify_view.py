"""What `threefold verify` shows: a row for each layout as it is done, and the line that sums up."""

import json
import sys
import time
from collections import Counter
from math import prod
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from threefold.config import Config
from threefold.verify.report import DEPARTS, EQUAL, FAILED, Result
from threefold.verify.run import Task
from threefold.verify.select import Selection
from threefold.verify.shrink import changes
from threefold.verify.variant import Variant

AXES = {"dp": ("dp", "dp·cp"), "tp": ("tp",), "pp": ("pp", "tie"), "cp": ("cp",)}
"""Columns of the table → the axes whose bytes they add up."""
_MARKS = {
    EQUAL: Text("✓ equal", "green"),
    DEPARTS: Text("✗ DEPARTS", "bold red"),
    FAILED: Text("! error", "bold yellow"),
}
_WIDTH_OF_A_FILE = 128
_LAYOUT, _WHERE = 20, 24  # least widths of the columns that adapt


class View:
    """Follows the layouts as they are done; a context, so that a live line ends with it.

    Args:
        task: what is verified.
        selection: the layouts.
    """

    def __init__(self, task: Task, selection: Selection) -> None:
        self.task, self.selection = task, selection
        self.results: list[Result] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._started = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """One process is done; `shapes` are the model's parameters."""
        self.shapes = shapes

    def running(self, variant: Variant) -> None:
        """A layout starts."""

    def add(self, result: Result) -> None:
        """A layout is done."""
        self.results.append(result)

    def finish(self) -> None:
        """All are done."""

    @property
    def all_equal(self) -> bool:
        return all(result.verdict == EQUAL for result in self.results)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def parameters(self) -> int:
        """Of the model that was run, a tied weight counted once."""
        return sum(prod(shape) for shape in self.shapes.values())


class JsonView(View):
    """One document at the end (docs/verify.md has its schema)."""

    def finish(self) -> None:
        config = self.task.config
        counts = Counter(result.verdict for result in self.results)
        document = {
            "model": str(self.task.source),
            "full": self.task.full,
            "parameters": self.parameters,
            "config": config.sections(),
            "data": str(self.task.rows),
            "steps": self.task.steps,
            "dtype": config.precision.dtype,
            "tolerance": self.task.tolerance,
            "layouts": [result.to_json() for result in self.results],
            "not_composable": [
                {"layout": str(refused.variant), "reason": refused.reason} for refused in self.selection.refused
            ],
            "counts": {verdict: counts[verdict] for verdict in (EQUAL, DEPARTS, FAILED)},
            "seconds": round(self.seconds, 3),
        }
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=True))


class TableView(View):
    """A table that grows row by row, with a live line below it on a terminal.

    Args:
        before: the config before it was shrunk.
        verbose: whether to say why layouts do not compose, and to show tracebacks.
    """

    def __init__(self, task: Task, selection: Selection, before: Config, verbose: bool) -> None:
        super().__init__(task, selection)
        self.before, self.verbose = before, verbose
        width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
        self.console = Console(highlight=False, width=width)
        self._progress = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            transient=True,
            disable=not sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("one process", total=len(selection.variants))
        longest = max((len(str(variant)) for variant in selection.variants), default=0)
        self._layout = max(_LAYOUT, longest)
        self._columns = {column: axes for column, axes in AXES.items() if self._used(column)}
        self._where = max(_WHERE, self.console.width - self._layout - 10 - 9 - 8 - 9 * len(self._columns) - 9)

    def __enter__(self) -> Self:
        self.console.print(f"\n[bold]{self.task.source}[/] in one process and in {self._count()}")
        self.console.print(self._how(), style="dim")
        self.console.print()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().begin(shapes)
        table = self._table()
        heads = [f"{axis} bytes" for axis in self._columns]
        table.add_row("layout", "verdict", "worst", "where", *heads, "time", style="bold")
        self.console.print(table)
        self.console.print("─" * min(self.console.width, self._full_width()), style="dim")

    def running(self, variant: Variant) -> None:
        self._progress.update(self._task, description=str(variant))

    def add(self, result: Result) -> None:
        super().add(result)
        table = self._table()
        worst = f"{result.worst.relative:.1e}" if result.worst else ""
        where = Text(str(result.worst) if result.worst else "", "dim")
        table.add_row(
            Text(str(result.variant)),
            _MARKS[result.verdict],
            Text(worst, "" if result.verdict == EQUAL else "red"),
            where,
            *(_bytes(result, axes) for axes in self._columns.values()),
            f"{result.seconds:.1f} s",
        )
        self.console.print(table)
        for line in self._explanation(result):
            self.console.print(Text(f"    {line}"), style="yellow" if result.verdict == FAILED else "red")
        if self.verbose and result.details:
            self.console.print(Text(result.details), style="dim")
        self._progress.advance(self._task)

    def finish(self) -> None:
        self.console.print()
        self.console.print(self._summary())
        refused = self.selection.refused
        if refused:
            hint = "" if self.verbose else " (--verbose says why)"
            self.console.print(f"Not composable: {len(refused)}{hint}.", style="dim")
        if self.verbose:
            for reason, count in Counter(refused.reason for refused in self.selection.refused).most_common():
                self.console.print(Text(f"  {count} ×  {reason}"), style="dim", soft_wrap=True)

    def _count(self) -> str:
        count = len(self.selection.variants)
        return f"{count} layout{'' if count == 1 else 's'}"

    def _how(self) -> str:
        config = self.task.config
        changed = changes(self.before, config)
        shrunk = "As it is." if self.task.full else f"Shrunk: {', '.join(changed)} (--full: as it is)."
        return (
            f"{self.task.steps} steps of {config.train.global_batch_size} × {config.data.sequence_length} tokens "
            f"({self.task.rows}), {config.optimizer.name}, {config.precision.dtype}: "
            f"equal means a relative error of at most {self.task.tolerance:.0e}.\n{shrunk}"
        )

    def _table(self) -> Table:
        """One row of the table, or its head: all have the same columns."""
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        table.add_column(width=self._layout, no_wrap=True)
        table.add_column(width=9, no_wrap=True)
        table.add_column(width=7, justify="right", no_wrap=True)
        table.add_column(width=self._where, no_wrap=True, overflow="ellipsis")
        for _ in self._columns:
            table.add_column(width=8, justify="right", no_wrap=True)
        table.add_column(width=7, justify="right", no_wrap=True)
        return table

    def _full_width(self) -> int:
        return self._layout + 1 + 10 + 8 + self._where + 1 + 9 * len(self._columns) + 8

    def _used(self, axis: str) -> bool:
        return any(variant.layout.size(axis) > 1 for variant in self.selection.variants)

    def _explanation(self, result: Result) -> list[str]:
        if result.verdict == EQUAL:
            return []
        lines = [result.message] if result.message else []
        if result.first:
            first = result.first
            lines.append(f"first: {first} by {first.relative:.1e}, at {first.where(result.variant.layout)}")
        if result.departing:
            lines.append(f"{len(result.departing)} of {len(self.shapes)} parameters depart.")
        if result.nearest_to_loss:
            lines[-1] += (
                f" The loss is equal and so are the gradients behind {result.nearest_to_loss}: "
                "look at the backward pass there."
            )
        return lines

    def _summary(self) -> Text:
        counts = Counter(result.verdict for result in self.results)
        worst = max((result.worst.relative for result in self.results if result.worst), default=0.0)
        taken = f"{self.seconds:.0f} s"
        if self.all_equal:
            many = "All" if len(self.results) > 1 else "The"
            verb = "compute" if len(self.results) > 1 else "computes"
            return Text(
                f"✓ {many} {self._count()} {verb} what one process computes: {self.parameters:,} parameters, "
                f"worst relative error {worst:.1e} of {self.task.tolerance:.0e} allowed, {taken}.",
                "bold green",
            )
        parts = [f"{counts[DEPARTS]} of {self._count()} depart from one process"] if counts[DEPARTS] else []
        parts += [f"{counts[FAILED]} of {self._count()} did not run to the end"] if counts[FAILED] else []
        return Text(f"✗ {', '.join(parts)}; {counts[EQUAL]} equal, {taken}.", "bold red")


def _bytes(result: Result, axes: tuple[str, ...]) -> Text:
    size = sum(nbytes for axis, nbytes in result.sent if axis in axes)
    if not size:
        return Text("·", "dim")
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return Text(f"{size / scale:.1f} {unit}")
    return Text(f"{size} B")
