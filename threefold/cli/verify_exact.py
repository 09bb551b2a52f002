"""`threefold verify --exact`: compare the bits of layouts inside the grain with those of a single process."""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import typer

from threefold.cli.terminal import Steps
from threefold.files import counted, first_of

if TYPE_CHECKING:
    from threefold.comm.layout import LayoutSpec
    from threefold.config import Config
    from threefold.verify.exact import ExactResult, ExactVerifier
    from threefold.verify.layouts import ExactSelection

STEPS: Final = 5
_LAYOUT: Final = len("1 process, 16 threads")
"""Minimum width of the layout column."""
_NAMED: Final = 6
"""Layouts outside the grain that a line names; `--verbose` names all."""


def verify_exact(
    given: "Config",
    specs: "Sequence[LayoutSpec]",
    every: bool,
    ranks: int,
    steps: int,
    dtype: str | None,
    threads: Sequence[int],
    as_json: bool,
    verbose: bool,
) -> None:
    """Train a config's model in one process, also with other numbers of threads, and in each layout; compare all bits.

    Without `specs`, the layouts are a selection of `ranks` ranks, or all of them if `every`.
    """
    from threefold.data.dataset import vocabulary
    from threefold.launch.process import require_room
    from threefold.verify import layouts

    most = max((spec.world_size for spec in specs), default=ranks)
    require_room(most)
    base = layouts.prepare_exact(given, dtype, vocabulary(given) or layouts.UNKNOWN_EXACT_VOCABULARY)
    small = layouts.shrink_exact(base, specs or layouts.possible(ranks, given.model.num_experts))
    selection = layouts.asked_for_exact(small, specs) if specs else layouts.select_exact(small, ranks, every)
    # These import torch, and the errors above should not wait for it.
    from threefold.verify.exact import ExactVerification, exact_verifier
    from threefold.verify.verifier import EQUAL, choose_batches

    task, started = ExactVerification(small, steps, choose_batches(given)), time.perf_counter()
    results: list[ExactResult] = []
    many = len(threads) + len(selection.specs)
    with exact_verifier(task, most) as check, Steps("Verifying", shown=as_json, lines=True) as bar:
        bar.tell("one process", 0, many)
        check.run_one_process()
        table = _Table(check, selection, shown=not as_json, verbose=verbose)
        for number in threads:
            bar.tell(f"one process, {counted(number, 'thread')}", len(results), many)
            results.append(check.verify_threads(number))
            table.add(results[-1])
        for spec in selection.specs:
            bar.tell(str(spec), len(results), many)
            results.append(check.verify(spec))
            table.add(results[-1])
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
            "outside_grain": [{"layout": str(each.spec), "reason": each.reason} for each in selection.outside],
            "seconds": round(seconds, 3),
        }
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        table.finish(results, seconds)
    if any(result.verdict != EQUAL for result in results) or not results:
        raise typer.Exit(1)


class _Table:
    """Table that is printed row by row: layout, verdict, hash of the weights after the last step, and seconds."""

    def __init__(self, check: "ExactVerifier", selection: "ExactSelection", shown: bool, verbose: bool) -> None:
        from rich.console import Console

        self._check, self._selection, self._verbose = check, selection, verbose
        self._console = Console(highlight=False, quiet=not shown, soft_wrap=True)
        self._width = max([_LAYOUT, *(len(str(spec)) for spec in selection.specs)])
        task, config, train = check.task, check.task.config, check.task.config.train
        context = f", {train.grain_context} context pieces" if train.grain_context > 1 else ""
        facts = {
            "model": f"{task.source.describe(config)}, shrunk to {check.parameters:,} parameters",
            "steps": f"{task.steps} of {train.global_batch_size} × {config.data.sequence_length} tokens, "
            f"{task.rows}; {config.optimizer.name}, {config.precision.dtype}",
            "grain": f"{train.grain_samples} groups of samples, {train.grain_tensor} tensor pieces{context}",
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

    def finish(self, results: "list[ExactResult]", seconds: float) -> None:
        """Print the summary, and the layouts outside the grain."""
        from threefold.train.evaluation import unknown_calls_line
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
        if self._check.unknown_calls:
            self._print(f"  {unknown_calls_line(self._check.unknown_calls)}", "yellow")
        by_reason: dict[str, list[str]] = {}
        for each in self._selection.outside:
            by_reason.setdefault(each.reason, []).append(str(each.spec))
        if by_reason:
            self._print(f"  Outside the grain: {counted(len(self._selection.outside), 'layout')}.", "dim")
        for reason, layouts in by_reason.items():
            named = first_of(layouts, len(layouts) if self._verbose else _NAMED)
            self._print(f"    {named}: {reason}", "dim")

    def _print(self, line: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(line, style))

    def _row(self, label: str, verdict: str, weights: str, seconds: str) -> str:
        return f"{label:<{self._width}}  {verdict:<9}  {weights:<12}  {seconds:>8}".rstrip()
