"""Output of `threefold verify`: a table row per layout as it finishes and a summary line, or one JSON document."""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from threefold.byte_sizes import format_bytes
from threefold.comm.layout import LayoutSpec
from threefold.config import Config
from threefold.config.optimizer import hyper_parameters
from threefold.verify.layout_selection import Selection
from threefold.verify.reference import CLIP_SHARE
from threefold.verify.report import DEPARTS, EQUAL, FAILED, UNSPLIT, LayoutResult
from threefold.verify.shrunk_config import changes
from threefold.verify.verifier import Verification

AXES = {"dp": ("dp", "dp·cp", "expert copies"), "tp": ("tp",), "pp": ("pp", "tie"), "cp": ("cp",), "ep": ("ep",)}
"""Column of the table → the mesh axes whose bytes it sums."""
_MARKS = {
    EQUAL: Text("✓ equal", "green"),
    DEPARTS: Text("✗ DEPARTS", "bold red"),
    FAILED: Text("! error", "bold yellow"),
    UNSPLIT: Text("⚠ unsplit", "bold yellow"),
}
_WIDTH_OF_A_FILE = 150
_LAYOUT, _WHERE, _WIDEST_WHERE = 16, 24, 44
"""Minimum width of the layout column; minimum and maximum width of the column with the worst error."""


class View:
    """Base class of views: a context manager that receives results as layouts finish."""

    def __init__(self, task: Verification, selection: Selection) -> None:
        self.task, self.selection = task, selection
        self.results: list[LayoutResult] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._started = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Handle the end of the single-process run; `shapes` maps parameter names to shapes."""
        self.shapes = shapes

    def running(self, spec: LayoutSpec) -> None:
        """Handle the start of a layout."""

    def add(self, result: LayoutResult) -> None:
        self.results.append(result)

    def finish(self) -> None:
        """Handle the end of all layouts."""

    @property
    def all_equal(self) -> bool:
        return all(result.verdict == EQUAL for result in self.results)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def parameters(self) -> int:
        """Parameter count of the verified model; tied embeddings count once."""
        return sum(prod(shape) for shape in self.shapes.values())


class JsonView(View):
    """View that prints one JSON document at the end (schema in docs/verify.md)."""

    def finish(self) -> None:
        config = self.task.config
        counts = Counter(result.verdict for result in self.results)
        document = {
            "model": self.task.source.describe(config),
            "full": self.task.full,
            "parameters": self.parameters,
            "config": config.sections(),
            "data": str(self.task.rows),
            "steps": self.task.steps,
            "dtype": config.precision.dtype,
            "tolerance": self.task.tolerance,
            "layouts": [result.to_json() for result in self.results],
            "not_composable": [
                {"layout": str(unsupported.spec), "reason": unsupported.reason}
                for unsupported in self.selection.unsupported
            ],
            "counts": {verdict: counts[verdict] for verdict in (EQUAL, DEPARTS, FAILED, UNSPLIT)},
            "seconds": round(self.seconds, 3),
        }
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=True))


class TableView(View):
    """Table that grows row by row, with a live line below it on a terminal.

    Args:
        before: the config before it was shrunk.
        verbose: whether to print why layouts are unsupported, and tracebacks.
    """

    def __init__(self, task: Verification, selection: Selection, before: Config, verbose: bool) -> None:
        super().__init__(task, selection)
        self.before, self.verbose = before, verbose
        live = sys.stdout.isatty()
        self.console = Console(highlight=False, width=None if live else _WIDTH_OF_A_FILE)
        self._columns = _Columns.fitting(selection.specs, self.console.width)
        self._progress = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            transient=True,
            disable=not live,
        )
        self._task = self._progress.add_task("one process", total=len(selection.specs))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().begin(shapes)
        self.console.print()
        self.console.print(self._facts())
        self.console.print()
        self.console.print(self._columns.head())
        self.console.print("─" * self._columns.width, style="dim")

    def running(self, spec: LayoutSpec) -> None:
        self._progress.update(self._task, description=str(spec))

    def add(self, result: LayoutResult) -> None:
        super().add(result)
        self.console.print(self._columns.row(result))
        for line in explanation(result, len(self.shapes)):
            self.console.print(
                Padding(Text(line), (0, 0, 0, 4), expand=False), style="red" if result.verdict == DEPARTS else "yellow"
            )
        if self.verbose and result.details:
            self.console.print(Padding(Text(result.details.rstrip()), (0, 0, 0, 4), expand=False), style="dim")
        self._progress.advance(self._task)

    def finish(self) -> None:
        self.console.print()
        self.console.print(self._summary(), soft_wrap=True)
        unsupported = self.selection.unsupported
        if unsupported:
            hint = "" if self.verbose else " (--verbose for the reasons)"
            self.console.print(f"  Unsupported: {len(unsupported)} more{hint}.", style="dim")
        if self.verbose:
            for reason, count in Counter(each.reason for each in unsupported).most_common():
                self.console.print(Text(f"  {count:>4} × {reason}"), style="dim", soft_wrap=True)

    def _facts(self) -> Table:
        config, task = self.task.config, self.task
        size = "as it is" if task.full else f"shrunk (--full: as it is) {', '.join(changes(self.before, config))}"
        facts = {
            "model": f"{task.source.describe(config)}, {self.parameters:,} parameters",
            "size": size,
            "steps": f"{task.steps} of {config.train.global_batch_size} × {config.data.sequence_length} tokens, "
            f"{task.rows}{', some labels masked' if task.rows.masked else ''}; {_optimizer(config)}, "
            f"{f'clipped to {CLIP_SHARE:g} of the first norm' if config.optimizer.clip_grad_norm else 'no clip'}",
            "equal": f"a relative error of at most {task.tolerance:.0e} in {config.precision.dtype}: initial weights, "
            "and loss, gradients, their norm and weights of each step",
            "also": _further(task, self.selection.second_every),
        }
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold")
        table.add_column(style="dim", max_width=self._columns.width - 7)
        for name, fact in facts.items():
            table.add_row(name, Text(fact))
        return table

    def _summary(self) -> Text:
        counts = Counter(result.verdict for result in self.results)
        worst = max((result.worst.relative for result in self.results if result.worst), default=0.0)
        many = len(self.results)
        if self.all_equal:
            subject = f"All {many} layouts compute" if many > 1 else "The layout computes"
            return Text(
                f"✓ {subject} what one process computes: worst relative error {worst:.1e}, "
                f"{self.task.tolerance:.0e} allowed; {self.seconds:.0f} s.",
                "bold green",
            )
        parts = [f"{counts[DEPARTS]} of {many} layouts depart from one process"] if counts[DEPARTS] else []
        parts += [f"{counts[FAILED]} of {many} layouts did not run to the end"] if counts[FAILED] else []
        idle = "of the model over one of the axes, which proves nothing"
        parts += [f"{counts[UNSPLIT]} of {many} layouts with nothing split {idle}"] if counts[UNSPLIT] else []
        if not counts[DEPARTS] + counts[FAILED]:
            return Text(f"⚠ {', '.join(parts)}; {counts[EQUAL]} equal; {self.seconds:.0f} s.", "bold yellow")
        return Text(f"✗ {', '.join(parts)}; {counts[EQUAL]} equal; {self.seconds:.0f} s.", "bold red")


@dataclass(frozen=True)
class _Columns:
    """Column widths of the table, whose rows are printed one by one as results arrive."""

    layout: int
    where: int
    axes: tuple[str, ...]

    VERDICT, WORST, HELD, BYTES, TIME = 9, 7, 11, 8, 7

    @classmethod
    def fitting(cls, specs: Sequence[LayoutSpec], width: int) -> Self:
        """Fit the columns to the layouts and the terminal; columns of bytes are dropped if they do not fit."""
        layout = max(_LAYOUT, *(len(str(spec)) for spec in specs))
        axes = tuple(axis for axis in AXES if any(spec.layout.size(axis) > 1 for spec in specs))
        for shown in (axes, ()):
            where = width - cls(layout, 0, shown).width
            if where >= _WHERE:
                break
        return cls(layout, min(max(where, _WHERE), _WIDEST_WHERE), shown)

    @property
    def width(self) -> int:
        return sum(self._widths()) + len(self._widths()) - 1

    def head(self) -> Table:
        heads = [f"{axis} bytes" for axis in self.axes]
        return self._line("layout", "verdict", "worst", "of", "params/rank", *heads, "time", style="bold")

    def row(self, result: LayoutResult) -> Table:
        worst, where = ("", "") if result.worst is None else (f"{result.worst.relative:.1e}", result.worst.short)
        return self._line(
            Text(str(result.spec)),
            _MARKS[result.verdict],
            Text(worst, "" if result.verdict == EQUAL else "red"),
            Text(where, "dim"),
            _count(result.parameters),
            *(_bytes(result, AXES[axis]) for axis in self.axes),
            f"{result.seconds:.1f} s",
        )

    def _widths(self) -> list[int]:
        return [self.layout, self.VERDICT, self.WORST, self.where, self.HELD, *[self.BYTES] * len(self.axes), self.TIME]

    def _line(self, *cells: Text | str, style: str = "") -> Table:
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        for place, width in enumerate(self._widths()):
            left = place in (0, 1, 3)
            table.add_column(width=width, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
        table.add_row(*cells, style=style)
        return table


def explanation(result: LayoutResult, parameters: int) -> list[str]:
    """Return the lines that explain a layout that is not equal, for a model with this number of parameter tensors."""
    lines = [result.message] if result.message else []
    if result.first:
        first = result.first
        lines.append(f"first: {first}, off by {first.relative:.1e}, on {first.where(result.spec.layout)}")
    if result.departing and result.first:
        when = f"in step {result.first.step}" if result.first.step else "from the start"
        lines.append(f"{len(result.departing)} of {parameters} parameters depart {when}")
    if result.nearest_to_loss:
        lines[-1] += (
            f"; the loss is right and so is every gradient behind {result.nearest_to_loss}: "
            "look at the backward pass from there to the loss"
        )
    return [f"{line.rstrip('.')}." for line in lines]


def _optimizer(config: Config) -> str:
    optimizer = config.optimizer
    reads_eps = "eps" in hyper_parameters(optimizer.name)
    return f"{optimizer.name}, eps {optimizer.eps:g}" if reads_eps else optimizer.name


def _further(task: Verification, every: int) -> str:
    """Describe the comparisons beside the steps; one layout in `every` has the second run."""
    evaluation, second = "the loss in evaluation mode between gradients and update", task.second
    if second is None:
        return evaluation
    model, data = second.config.model, second.config.data
    drops = model.hidden_dropout > 0 or model.attention_dropout > 0
    features = [*(["dropout"] if drops else []), *(["packed documents"] if data.separate_documents else [])]
    features.append("a loss scale")
    which = f" of one layout in {every} (--all: of each)" if every > 1 else ""
    return (
        f"{evaluation}; a second run{which} with {', '.join(features)}, a gradient that overflows on "
        "one rank, a skipped step, and its last step after resuming, from the layout's checkpoint and one process's"
    )


def _count(parameters: int) -> Text:
    if not parameters:
        return Text("·", "dim")
    return Text(f"{parameters:,}" if parameters < 1e9 else f"{parameters / 1e9:,.2f} bn")


def _bytes(result: LayoutResult, axes: tuple[str, ...]) -> Text:
    size = sum(nbytes for axis, nbytes in result.sent if axis in axes)
    if not size:
        return Text("·", "dim")
    return Text(format_bytes(size, "B"))
