"""`threefold verify`: compare layouts with a single process."""

import ast
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import typer
from typer import Argument, Option

from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.files import counted, first_of, format_bytes, shown
from threefold.report.progress import Steps
from threefold.terminal import CUSTOM_MODEL, ConfigFile, Overrides, TrustCode, read_config

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from threefold.comm.layout import LayoutSpec
    from threefold.config import Config
    from threefold.verify.exact import ExactResult, ExactVerifier, ProductsTried
    from threefold.verify.layouts import Check, Selection
    from threefold.verify.verifier import LayoutResult, Verdict, Verification


def command(
    config: ConfigFile,
    named: list[str] | None = Argument(
        None, metavar="[LAYOUT]...", help="Layout such as dp2,tp2,pp2 or tp4,pp2:zbv.", show_default="a selection"
    ),
    layouts: list[str] | None = Option(
        None, "--layouts", "--layout", metavar="LAYOUT", help="Another way to give layouts, separated by `;`."
    ),
    every: bool = Option(False, "--all", help="Verify every valid layout of --ranks ranks."),
    ranks: int = Option(8, min=2, max=1024, help="Ranks of the layouts in the default selection and in --all."),
    exact: bool = Option(
        False, "--exact", help="Train with train.exact and compare bits, in layouts inside the grain."
    ),
    threads: str | None = Option(
        None, metavar="N,N…", help="With --exact: also compare one process with each of these numbers of threads."
    ),
    steps: int | None = Option(
        None, min=1, max=10_000, help="Optimizer steps to compare.", show_default="3, or 5 with --exact"
    ),
    dtype: Literal["fp64", "fp32"] | None = Option(
        None,
        help="Precision; the tolerance is 1e-12 for fp64, 1e-5 for fp32.",
        show_default="fp64, or the config's with --exact",
    ),
    full: bool = Option(
        False, "--full/--shrink", help="Verify the full-size model, or one shrunk to fewer and narrower layers."
    ),
    model: str | None = Option(
        None,
        metavar="FILE.py[:PLAN]",
        help="Your own model and its sharding plan.",
        show_default="GPT",
        rich_help_panel=CUSTOM_MODEL,
    ),
    trust_code: TrustCode = False,
    overrides: Overrides = None,
    as_json: bool = Option(
        False, "--json", help="Print a JSON document (docs/verify.md), and progress on standard error."
    ),
    verbose: bool = Option(False, "--verbose", help="Also print why layouts are unsupported, and tracebacks."),
) -> None:
    """Train CONFIG's model for a few steps in a single process and in each LAYOUT, and compare the results.

    Initial weights, and each step's loss, gradient norm, gradients and updated weights must be equal up to rounding; so
    must evaluation, packed documents, a loss scale with an overflow, a skipped step and a resumed run (docs/verify.md).
    With --exact, all bits must be equal (docs/exact.md), and layouts outside the grain are listed.
    Exit status: 0 if every layout is equal; 1 if one differs, fails, or shards nothing over one of its axes; 2 if
    verification cannot start.

    Examples:
      threefold verify run.yaml
      threefold verify run.yaml dp2,tp2,pp2 tp4,pp2:zbv
      threefold verify run.yaml --all --ranks 4
    """
    from threefold.config.model import CUSTOM, split_model_file
    from threefold.data.dataset import vocabulary
    from threefold.verify import layouts as choices

    from_section = model is not None and _is_made_from_section(*split_model_file(model))
    given = read_config(config, overrides, None if from_section else model, trust_code)
    nested = choices.names_nested_data(given)
    specs = choices.parse_layouts([*(layouts or ()), *(named or ())])
    if specs and every:
        raise UserError("Layouts are given and --all too; leave one of the two out.")
    if exact:
        if from_section:
            raise UserError("--exact does not go with --model; leave one of the two out.")
        words = [] if threads is None else threads.split(",")
        if not all(word.strip().isdigit() and 1 <= int(word) <= _MOST_THREADS for word in words):
            raise UserError(
                f"--threads {shown(str(threads))} must be numbers from 1 to {_MOST_THREADS}, such as 1,2,4."
            )
        _verify_exact(given, specs, every, ranks, steps or 5, dtype, [*map(int, words)], full, as_json, verbose)
        return
    if threads is not None:
        raise UserError("--threads goes only with --exact; give both, or leave --threads out.")
    dtype, steps = dtype or "fp64", steps or 3
    call_hook("require_room", max((spec.world_size for spec in specs), default=ranks))
    base = choices.prepare(given, dtype, vocabulary(given) or choices.UNKNOWN_VOCABULARY)
    wanted = specs or choices.possible(ranks, given.model.num_experts)
    small = base if full else choices.shrink(base, wanted, batch_alone=nested)
    custom = given.model.architecture == CUSTOM

    def select(check: "Check") -> "Selection":
        if specs:
            return choices.asked_for(small, specs, check)
        return (choices.every if every else choices.covering)(small, ranks, check)

    if not custom:
        selection = select(choices.suits)
    # These import torch, and the errors above should not wait for it.
    from threefold.models.source import ConfigSource, FileSource
    from threefold.parallel.layout_check import layout_check
    from threefold.verify.verifier import DEPARTS, EQUAL, FAILED, UNSPLIT, Verification, choose_batches, verifier

    source = FileSource.parse(model) if model is not None and from_section else ConfigSource()
    if custom:
        selection = select(layout_check(source, small))
    task = Verification(small, steps, choose_batches(given, source.loss(small)), source, full, thorough=every)
    started = time.perf_counter()
    view = _Table(task, selection, base, shown=not as_json, verbose=verbose)
    results: list[LayoutResult] = []
    many, bar = len(selection.specs), Steps("Verifying", shown=as_json, lines=True)
    with verifier(task, selection) as check, view, bar:  # workers are forked before the live line starts its thread
        bar.tell("one process", 0, many)
        check.run_one_process()
        view.begin(check.shapes)
        for spec in selection.specs:
            view.progress.update(view.line, description=str(spec))
            bar.tell(str(spec), len(results), many)
            results.append(check.verify(spec, selection.has_second_run(spec)))
            view.add(results[-1])
    seconds = time.perf_counter() - started
    if as_json:
        counts = Counter(result.verdict for result in results)
        document = {
            "model": source.describe(small),
            "full": full,
            "parameters": sum(map(prod, check.shapes.values())),
            "config": small.sections(),
            "data": str(task.rows),
            "steps": steps,
            "dtype": small.precision.dtype,
            "tolerance": task.tolerance,
            "layouts": [result.to_json() for result in results],
            "not_composable": [{"layout": str(each.spec), "reason": each.reason} for each in selection.unsupported],
            "counts": {verdict: counts[verdict] for verdict in (EQUAL, DEPARTS, FAILED, UNSPLIT)},
            "seconds": round(seconds, 3),
        }
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=True))
    else:
        view.finish(results, seconds)
    if any(result.verdict != EQUAL for result in results):
        raise typer.Exit(1)


_MOST_THREADS: Final = 1024
_AXES: Final = {
    "dp": ("dp", "dp·cp", "expert copies"),
    "tp": ("tp",),
    "pp": ("pp", "tie"),
    "cp": ("cp",),
    "ep": ("ep",),
}
"""Column of the table → the mesh axes whose bytes it sums."""
_WIDTH_OF_A_FILE: Final = 150
_LAYOUT, _WHERE, _WIDEST_WHERE = 16, 24, 44
"""Minimum width of the layout column; minimum and maximum width of the column with the worst error."""


class _Table:
    """Table that is printed row by row, with a live line below it on a terminal; a context manager.

    Its rows are printed one by one, so the widths of its columns are fixed from the start: columns of bytes are dropped
    if they do not fit. `before` is the config before it was shrunk.
    """

    def __init__(
        self, task: "Verification", selection: "Selection", before: "Config", shown: bool, verbose: bool
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._task, self._selection, self._before, self._verbose = task, selection, before, verbose
        self._tensors = 0
        live = shown and sys.stdout.isatty()
        self._console = Console(highlight=False, width=None if live else _WIDTH_OF_A_FILE, quiet=not shown)
        parts = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn())
        doing = TextColumn("{task.description}")
        self.progress = Progress(*parts, doing, console=self._console, transient=True, disable=not live)
        self.line = self.progress.add_task("one process", total=len(selection.specs))
        layout = max([_LAYOUT, *(len(str(spec)) for spec in selection.specs)])
        axes = [axis for axis in _AXES if any(spec.layout.size(axis) > 1 for spec in selection.specs)]
        for self._axes in (axes, []):
            self._widths = [layout, 9, 7, 0, 11, *[8] * len(self._axes), 7]
            room = self._console.width - sum(self._widths) - len(self._widths) + 1
            if room >= _WHERE:
                break
        self._widths[3] = min(max(room, _WHERE), _WIDEST_WHERE)
        self._width = sum(self._widths) + len(self._widths) - 1

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def begin(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Print the facts and the header after the single-process run, whose parameters have these shapes."""
        self._tensors = len(shapes)
        self._console.print()
        self._console.print(self._facts(sum(map(prod, shapes.values()))))
        self._console.print()
        heads = [f"{axis} bytes" for axis in self._axes]
        self._console.print(self._row("layout", "verdict", "worst", "of", "params/rank", *heads, "time", style="bold"))
        self._console.print("─" * self._width, style="dim")

    def add(self, result: "LayoutResult") -> None:
        """Print the row of a layout, and an explanation if it is not equal."""
        from rich.padding import Padding
        from rich.text import Text

        from threefold.verify.verifier import DEPARTS, EQUAL, FAILED, UNSPLIT

        marks = {
            EQUAL: Text("✓ equal", "green"),
            DEPARTS: Text("✗ DEPARTS", "bold red"),
            FAILED: Text("! error", "bold yellow"),
            UNSPLIT: Text("⚠ unsplit", "bold yellow"),
        }
        worst, where = ("", "") if result.worst is None else (f"{result.worst.relative:.1e}", result.worst.short)
        held, nothing = result.parameters, Text("·", "dim")
        sent = [sum(nbytes for axis, nbytes in result.sent if axis in _AXES[column]) for column in self._axes]
        row = self._row(
            Text(str(result.spec)),
            marks[result.verdict],
            Text(worst, "" if result.verdict == EQUAL else "red"),
            Text(where, "dim"),
            Text(f"{held:,}" if held < 1e9 else f"{held / 1e9:,.2f} bn") if held else nothing,
            *(Text(format_bytes(size, "B")) if size else nothing for size in sent),
            f"{result.seconds:.1f} s",
        )
        self._console.print(row)
        color = "red" if result.verdict == DEPARTS else "yellow"
        lines = [(line, color) for line in _explanation(result, self._tensors)]
        if self._verbose and result.details:
            lines.append((result.details.rstrip(), "dim"))
        for line, style in lines:
            self._console.print(Padding(Text(line), (0, 0, 0, 4), expand=False), style=style)
        self.progress.advance(self.line)

    def finish(self, results: "list[LayoutResult]", seconds: float) -> None:
        """Print the summary, and how many layouts are unsupported."""
        from rich.text import Text

        from threefold.verify.verifier import DEPARTS, EQUAL, FAILED, UNSPLIT

        counts, many = Counter(result.verdict for result in results), len(results)
        if counts[EQUAL] == many:
            tolerance = self._task.tolerance
            worst = max((result.worst.relative for result in results if result.worst), default=0.0)
            subject = f"All {many} layouts compute" if many > 1 else "The layout computes"
            text = f"{subject} what one process computes: worst relative error {worst:.1e}, {tolerance:.0e} allowed"
            summary = Text(f"✓ {text}; {seconds:.0f} s.", "bold green")
        else:
            wrong: dict[Verdict, str] = {
                DEPARTS: "layouts depart from one process",
                FAILED: "layouts did not run to the end",
                UNSPLIT: "layouts with nothing split of the model over one of the axes, which proves nothing",
            }
            parts = ", ".join(f"{counts[each]} of {many} {what}" for each, what in wrong.items() if counts[each])
            mark, style = ("✗", "bold red") if counts[DEPARTS] + counts[FAILED] else ("⚠", "bold yellow")
            summary = Text(f"{mark} {parts}; {counts[EQUAL]} equal; {seconds:.0f} s.", style)
        self._console.print()
        self._console.print(summary, soft_wrap=True)
        if unsupported := self._selection.unsupported:
            hint = "" if self._verbose else " (--verbose for the reasons)"
            self._console.print(f"  Unsupported: {len(unsupported)} more{hint}.", style="dim")
        if self._verbose:
            for reason, count in Counter(each.reason for each in unsupported).most_common():
                self._console.print(Text(f"  {count:>4} × {reason}"), style="dim", soft_wrap=True)

    def _facts(self, parameters: int) -> "Table":
        from rich.table import Column, Table
        from rich.text import Text

        from threefold.config.optimizer import hyper_parameters
        from threefold.verify.layouts import changes
        from threefold.verify.reference import CLIP_SHARE

        config, task = self._task.config, self._task
        optimizer = config.optimizer.name
        if "eps" in hyper_parameters(optimizer):
            optimizer += f", eps {config.optimizer.eps:g}"
        clip = f"clipped to {CLIP_SHARE:g} of the first norm" if config.optimizer.clip_grad_norm else "no clip"
        size = "as it is" if task.full else f"shrunk (--full: as it is) {', '.join(changes(self._before, config))}"
        facts = {
            "model": f"{task.source.describe(config)}, {parameters:,} parameters",
            "size": size,
            "steps": f"{task.steps} of {config.train.global_batch_size} × {config.data.sequence_length} tokens, "
            f"{task.rows}{', some labels masked' if task.rows.masked else ''}; {optimizer}, {clip}",
            "equal": f"a relative error of at most {task.tolerance:.0e} in {config.precision.dtype}: initial weights, "
            "and loss, gradients, their norm and weights of each step",
            "also": _further(task, self._selection.second_every),
        }
        columns = (Column(style="bold"), Column(style="dim", max_width=self._width - 7))
        table = Table(*columns, box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, fact in facts.items():
            table.add_row(name, Text(fact))
        return table

    def _row(self, *cells: "Text | str", style: str = "") -> "Table":
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        for place, width in enumerate(self._widths):
            justify: Any = "left" if place in (0, 1, 3) else "right"
            is_name = place == 3  # of a parameter, which is whole in any width
            overflow: Any = "fold" if is_name else "ellipsis"
            table.add_column(width=width, justify=justify, no_wrap=not is_name, overflow=overflow)
        table.add_row(*cells, style=style)
        return table


def _is_made_from_section(file: Path, name: str) -> bool:
    """Return whether a file's `make_model`, and no class called `name`, makes the model; it is parsed, not executed."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):  # importing the file reports the error
        return False
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return "make_model" in functions and not any(isinstance(node, ast.ClassDef) and node.name == name for node in body)


def _explanation(result: "LayoutResult", parameters: int) -> list[str]:
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


def _further(task: "Verification", every: int) -> str:
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


def _verify_exact(
    given: "Config",
    specs: "Sequence[LayoutSpec]",
    every: bool,
    ranks: int,
    steps: int,
    dtype: str | None,
    threads: Sequence[int],
    full: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Train a config's model in one process, also with other numbers of threads, and in each layout; compare all bits.

    Without `specs`, the layouts are a selection of `ranks` ranks, or all of them if `every`.
    """
    from dataclasses import asdict

    from threefold.config.model import CUSTOM
    from threefold.data.dataset import vocabulary
    from threefold.verify import layouts

    most = max((spec.world_size for spec in specs), default=ranks)
    call_hook("require_room", most)
    base = layouts.prepare_exact(given, dtype, vocabulary(given) or layouts.UNKNOWN_EXACT_VOCABULARY)
    wanted = specs or layouts.possible(ranks, given.model.num_experts)
    small = layouts.with_context_pieces(base, wanted) if full else layouts.shrink_exact(base, wanted)
    selection = layouts.by_validity(small, specs) if specs else layouts.select_exact(small, ranks, every)
    # These import torch, and the errors above should not wait for it.
    from threefold.verify.exact import exact_verifier
    from threefold.verify.verifier import EQUAL, Verification, choose_batches

    task, started = Verification(small, steps, choose_batches(given), full=full), time.perf_counter()
    results: list[ExactResult] = []
    many = len(threads) + len(selection.specs)
    with exact_verifier(task, most) as check, Steps("Verifying", shown=as_json, lines=True) as bar:
        bar.tell("one process", 0, many)
        check.run_one_process()
        table = _ExactTable(check, selection, shown=not as_json, verbose=verbose)
        for number in threads:
            bar.tell(f"one process, {counted(number, 'thread')}", len(results), many)
            results.append(check.verify_threads(number))
            table.add(results[-1])
        for spec in selection.specs:
            bar.tell(str(spec), len(results), many)
            results.append(check.verify(spec))
            table.add(results[-1])
        bar.tell("products of the run's own sizes", many, many)
        tried = None if given.model.architecture == CUSTOM else check.try_products(base, sorted({1, 2, 3, *threads}))
    seconds, train = time.perf_counter() - started, small.train
    if as_json:
        document = {
            "model": task.source.describe(small),
            "parameters": check.parameters,
            "config": small.sections(),
            "data": str(task.rows),
            "steps": steps,
            "dtype": small.precision.dtype,
            "grain": {"samples": train.grain_samples, "tensor": train.grain_tensor, "context": train.grain_context},
            "fingerprint": check.fingerprint,
            "layouts": [result.to_json() for result in results],
            "unknown_calls": check.unknown_calls,
            "products": tried and asdict(tried),
            "outside_grain": [{"layout": str(each.spec), "reason": each.reason} for each in selection.unsupported],
            "seconds": round(seconds, 3),
        }
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        table.finish(results, seconds, tried)
    if any(result.verdict != EQUAL for result in results) or not results or (tried and tried.different):
        raise typer.Exit(1)


class _ExactTable:
    """Table that is printed row by row: layout, verdict, hash of the weights after the last step, and seconds."""

    def __init__(self, check: "ExactVerifier", selection: "Selection", shown: bool, verbose: bool) -> None:
        from rich.console import Console

        self._check, self._selection, self._verbose = check, selection, verbose
        self._console = Console(highlight=False, quiet=not shown, soft_wrap=True)
        self._width = max([len("1 process, 16 threads"), *(len(str(spec)) for spec in selection.specs)])
        task, config, train = check.task, check.task.config, check.task.config.train
        context = f", {train.grain_context} context pieces" if train.grain_context > 1 else ""
        size = f"{'' if task.full else 'shrunk to '}{check.parameters:,} parameters"
        facts = {
            "model": f"{task.source.describe(config)}, {size}",
            "steps": f"{task.steps} of {train.global_batch_size} × {config.data.sequence_length} tokens, "
            f"{task.rows}; {config.optimizer.name}, {config.precision.dtype}",
            "grain": f"{train.grain_samples} parts of the batch, {train.grain_tensor} tensor pieces{context}",
            "equal": "the bits of initial weights, and of loss, gradients, their norm and weights of each step",
        }
        self._console.print()
        for name, fact in facts.items():
            self._print(f"{name:<6} {fact}", "dim")
        self._console.print()
        self._print(self._row("layout", "verdict", "weights", "time"), "bold")
        self._print(self._row("1 process", "", check.fingerprint, ""), "dim")

    def add(self, result: "ExactResult") -> None:
        """Print the row of a layout, and the first difference."""
        from threefold.verify.verifier import DEPARTS, EQUAL, FAILED

        marks = {EQUAL: "✓ equal", DEPARTS: "✗ DEPARTS", FAILED: "! error"}
        row = self._row(result.label, marks[result.verdict], result.fingerprint, f"{result.seconds:.1f} s")
        self._print(row, {EQUAL: "", DEPARTS: "red"}.get(result.verdict, "yellow"))
        if result.first is not None:
            others = f", and {counted(len(result.ranks) - 1, 'other rank')}" if len(result.ranks) > 1 else ""
            self._print(f"    first: {result.first}{others}.", "red")
        if result.message:
            self._print(f"    {result.message}", "yellow")
        if self._verbose and result.details:
            self._print(result.details.rstrip(), "dim")

    def finish(self, results: "list[ExactResult]", seconds: float, tried: "ProductsTried | None") -> None:
        """Print the summary, and the layouts outside the grain."""
        from threefold.train.loop import unknown_calls_line
        from threefold.verify.verifier import EQUAL

        self._console.print()
        equal, many = sum(result.verdict == EQUAL for result in results), len(results)
        if not many:
            self._print("✗ No layout is inside the grain.", "bold red")
        elif equal == many:
            text = f"{f'All {many} have' if many > 1 else 'It has'} the bits of one process: weights"
            after = f"{self._check.fingerprint} after {self._check.task.steps} steps"
            self._print(f"✓ {text} {after}; {seconds:.0f} s.", "bold green")
        else:
            self._print(f"✗ {many - equal} of {many} differ from one process or failed; {seconds:.0f} s.", "bold red")
        if tried is not None and tried.different:
            self._print(f"✗ Products of {', '.join(tried.different)} of the run differ between layouts.", "bold red")
        elif tried is not None:
            how = f"{tried.refused} of {counted(tried.trials, 'trial')} refused the faster way" if tried.refused else ""
            experts = f", {tried.experts} of experts with every number of rows," if tried.experts else ""
            sizes = f"{counted(tried.layers, 'size')} of layers{experts} have the bits of their parts"
            self._print(
                f"✓ The products of the run's own {sizes}; {how + '; ' if how else ''}{tried.seconds:.0f} s.", "green"
            )
        if self._check.unknown_calls:
            self._print(f"  {unknown_calls_line(self._check.unknown_calls)}", "yellow")
        by_reason: dict[str, list[str]] = {}
        for each in self._selection.unsupported:
            by_reason.setdefault(each.reason, []).append(str(each.spec))
        if by_reason:
            self._print(f"  Outside the grain: {counted(len(self._selection.unsupported), 'layout')}.", "dim")
        for reason, layouts in by_reason.items():
            named = first_of(layouts, len(layouts) if self._verbose else 6)
            self._print(f"    {named}: {reason}", "dim")

    def _print(self, line: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(line, style))

    def _row(self, label: str, verdict: str, weights: str, seconds: str) -> str:
        return f"{label:<{self._width}}  {verdict:<9}  {weights:<12}  {seconds:>8}".rstrip()
