"""The line by which people follow a run: printed every few steps, or live at the bottom of a terminal."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from threefold.files import format_bytes
from threefold.train.callbacks.base import Callback, RunContext, clock, on_terminal
from threefold.train.callbacks.records import EvaluationRecord, MeanRates, StepRecord

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

_SAME: Final = 0.0005
"""Relative change of the loss that is not a change."""
_WORTH_SAYING: Final = 0.01
"""Share of a step that its ranks wait for each other, below which it is left out."""
_WITH_BAR, _BAR = 150, 30
"""Columns of a terminal from which on a live line has a bar, and its cells."""
_WORTH_A_LOOK: Final = 0.5
"""Share of a step that its ranks wait for each other, from which on it is coloured."""


class Part(NamedTuple):
    """Part of a running line.

    Attributes:
        text: text; empty for a part that the run does not have.
        place: order in which a narrow terminal does without parts, the largest first; 0 for parts that always stay.
        style: style on a terminal, as rich names it.
    """

    text: str
    place: int = 0
    style: str = ""


class RunningLines:
    """Lines of about 100 characters: `step 225/500  loss 5.4565 ↓  val 5.7829  lr 2.11e-03  4,275 tok/s  479 ms …`.

    Args:
        steps: number of steps of the run.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._loss, self._valid = steps, 0.0, ""

    def step(self, since: Sequence[StepRecord]) -> str:
        """Format the last of the steps since the previous line, with averages of speed and time over them."""
        before, self._loss = self._loss, since[-1].loss
        return self.of(since[-1].step, *(part.text for part in self._parts(since, before)))

    def live(self, since: Sequence[StepRecord], width: int) -> "Text":
        """Return the line in colours, without parts that do not fit, and with a bar if there is room for one.

        Args:
            since: newest steps, over which speed and time are averaged; the loss is compared with the first of them.
            width: columns of the terminal.
        """
        from rich.text import Text

        step, parts = self.of(since[-1].step), [part for part in self._parts(since, since[0].loss) if part.text]
        while (room := width - len(step) - sum(2 + len(part.text) for part in parts)) < 1:
            if not (place := max(part.place for part in parts)):
                break
            parts = [part for part in parts if part.place != place]
        line = Text(step, "bold", no_wrap=True, overflow="ellipsis", end="")
        if width >= _WITH_BAR and room > _BAR + 2:
            done = _BAR * since[-1].step // self._steps
            line.append("  ").append("━" * done, "green").append("─" * (_BAR - done), "dim")
        for part in parts:
            line.append("  ").append(part.text, part.style)
        return line

    def evaluation(self, record: EvaluationRecord) -> str:
        """Format an evaluation, whose loss the next steps show too."""
        self._valid = f"val {record.loss:.4f}"
        of_parts = [f"of {name} {loss:.4f}" for name, loss in record.corpus_losses.items()]
        of_parts += [f"{name} {mean:.4f}" for name, mean in record.terms.items()]
        return self.of(record.step, f"validation loss {record.loss:.4f}", *of_parts, f"{record.seconds:.1f} s")

    def of(self, step: int, *parts: str) -> str:
        """Format parts of a line about a step; empty ones are left out."""
        width = len(f"{self._steps:,}")
        return "  ".join([f"step {step:>{width},}/{self._steps:,}", *(part for part in parts if part)])

    def _parts(self, since: Sequence[StepRecord], before: float) -> Iterator[Part]:
        """Yield the parts after the step, for a loss that was `before`; 0 if there was none."""
        last, seconds = since[-1], sum(record.seconds for record in since)
        change = (last.loss - before) / before if before else 0.0
        trend = " ↓" if change < -_SAME else " ↑" if change > _SAME else ""
        yield Part(f"loss {last.loss:.4f}{trend}", style="bold yellow" if change > _SAME else "bold green")
        for name, mean in last.terms.items():
            yield Part(f"{name} {mean:.4f}", 5)
        yield Part(self._valid, 1, "cyan")
        yield Part(f"lr {last.lr:.2e}", 4, "dim")
        yield Part(f"loss scale {last.loss_scale:,.0f}" if last.loss_scale is not None else "", 6, "dim")
        unit = "tok" if last.unit == "tokens" else last.unit
        yield Part(f"{sum(record.tokens_read for record in since) / seconds:,.0f} {unit}/s", 2)
        each = seconds / len(since)
        shown = f"{1000 * each:,.0f} ms" if each < 10 else f"{each:,.1f} s"
        waited = sum(record.performance.waited for record in since if record.performance is not None) / seconds
        waiting = f" ({waited:.0%} waiting)" if waited >= _WORTH_SAYING else ""
        yield Part(shown + waiting, 3, "yellow" if waited >= _WORTH_A_LOOK else "")
        rates = MeanRates.over(since)
        if rates.last is not None:
            yield Part(f"{rates.mfu:.1%} MFU" if rates.mfu else "", 7)
            yield Part(format_bytes(rates.last.largest_memory), 8)
        yield Part(f"epoch {last.epoch + 1}" if last.epoch else "", 9)
        if left := self._steps - last.step:
            yield Part(f"{clock(left * each)} left")
        elif rates.last is not None:
            yield Part(f"{clock(rates.last.wall_clock)} in all")


_AVERAGED: Final = 20
"""Steps over which a live line averages speed and time."""
_SECONDS_BETWEEN_REFRESHES: Final = 0.1


class LiveLine(Callback):
    """Live line at the bottom of a terminal: step, losses, speed, time left; evaluations and checkpoints above it."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback | None:
        return cls(run.config.train.max_steps) if on_terminal() else None

    def __init__(self, steps: int) -> None:
        self._steps, self._lines = steps, RunningLines(steps)
        self._since: deque[StepRecord] = deque(maxlen=_AVERAGED)
        self._live: Live | None = None
        self._told, self._drawn = "", 0.0

    def before_fit(self, start: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=sys.stdout, highlight=False)
        first = Text(self._lines.of(start, "the first step is the slowest"), "dim", end="")
        self._live = Live(first, console=console, auto_refresh=False)  # a refresh thread would slow the training thread
        self._live.start(refresh=True)

    def after_step(self, record: StepRecord) -> None:
        if record.reason and record.reason != self._told:
            self._print(self._lines.of(record.step, f"skipped: {record.reason}"), "yellow")
        self._told = record.reason
        if not record.is_read:
            return
        self._since.append(record)
        if time.monotonic() - self._drawn > _SECONDS_BETWEEN_REFRESHES or record.step == self._steps:
            self._draw()

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self._since.clear()
        self._print(self._lines.of(step, f"rolled back to step {start}: {reason}"), "yellow")

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._print(self._lines.evaluation(record), "cyan")
        self._draw()

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._print(self._lines.of(step, f"checkpoint: {path}"), "green")

    def after_stop(self, step: int, reason: str) -> None:
        self._print(self._lines.of(step, f"stopped: {reason}"), "red")

    def after_fit(self) -> None:
        self.close()  # other callbacks print below it

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> None:
        if self._live is None or not self._since:
            return
        self._live.update(self._lines.live(self._since, self._live.console.width), refresh=True)
        self._drawn = time.monotonic()

    def _print(self, line: str, style: str) -> None:
        if self._live is not None:
            self._live.console.print(line, style=style, soft_wrap=True, markup=False)
