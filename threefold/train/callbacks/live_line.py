"""The line by which people follow a run: printed every few steps, or live at the bottom of a terminal."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from threefold.files import format_bytes
from threefold.train.callbacks.base import Callback, RunContext, clock, on_terminal
from threefold.train.callbacks.records import EvaluationRecord, MeanRates, StepRecord

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SPEED_OF = 20
"""Span, in steps, of the exponential average of the displayed speed."""
_SECONDS_BETWEEN_REFRESHES = 0.1


_SAME: Final = 0.0005
"""Relative change of the loss that is no change."""
_WORTH_SAYING: Final = 0.01
"""Share of a step that its ranks wait for each other, below which it is left out."""


class RunningLines:
    """Lines of about 100 characters: `step 225/500  loss 5.4565 ↓  val 5.7829  lr 2.11e-03  4,275 tok/s  479 ms …`.

    Args:
        steps: number of steps of the run.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._loss, self._valid = steps, 0.0, ""

    def step(self, since: Sequence[StepRecord]) -> str:
        """Format the last of the steps since the previous line, with averages of speed and time over them."""
        last, seconds = since[-1], sum(record.seconds for record in since)
        unit = "tok" if last.unit == "tokens" else last.unit
        parts = [
            f"loss {last.loss:.4f}{self._trend(last.loss)}",
            *(f"{name} {mean:.4f}" for name, mean in last.terms.items()),
            self._valid,
            f"lr {last.lr:.2e}",
            f"loss scale {last.loss_scale:,.0f}" if last.loss_scale is not None else "",
            f"{sum(record.tokens_read for record in since) / seconds:,.0f} {unit}/s",
            self._time(since, seconds),
            *self._of_hardware(since),
            f"epoch {last.epoch + 1}" if last.epoch else "",
        ]
        if left := self._steps - last.step:
            parts.append(f"{clock(left * seconds / len(since))} left")
        return self.of(last.step, *parts)

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

    def _trend(self, loss: float) -> str:
        before, self._loss = self._loss, loss
        if not before or abs(loss - before) <= _SAME * before:
            return ""
        return " ↓" if loss < before else " ↑"

    @staticmethod
    def _time(since: Sequence[StepRecord], seconds: float) -> str:
        each = seconds / len(since)
        shown = f"{1000 * each:,.0f} ms" if each < 10 else f"{each:,.1f} s"
        waited = sum(record.performance.waited for record in since if record.performance is not None) / seconds
        return f"{shown} ({waited:.0%} waiting)" if waited >= _WORTH_SAYING else shown

    @staticmethod
    def _of_hardware(since: Sequence[StepRecord]) -> list[str]:
        rates = MeanRates.over(since)
        if rates.last is None:
            return []
        used = [f"{rates.mfu:.1%} MFU"] if rates.mfu else []
        return [*used, format_bytes(rates.last.largest_memory)]


class LiveLine(Callback):
    """Live line at the bottom of a terminal: step, losses, speed, time left; evaluations and checkpoints above it."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback | None:
        return cls(run.config.train.max_steps) if on_terminal() else None

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last: StepRecord | None = None
        self._told = ""
        self._speed, self._seconds, self._valid, self._drawn = 0.0, 0.0, "", 0.0

    def before_fit(self, start: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[shown]}"),
            console=Console(file=sys.stdout, highlight=False),
            auto_refresh=False,  # a refresh thread would slow the training thread
        )
        self._task = self._progress.add_task(
            "", total=self.steps, completed=start, shown="the first step is the slowest"
        )
        self._progress.start()
        self._progress.refresh()

    def after_step(self, record: StepRecord) -> None:
        if record.reason and record.reason != self._told:
            self._print(f"step {record.step}: skipped: {record.reason}")
        self._told = record.reason
        if not record.is_read:
            return
        weight = max(1 / record.step, 2 / (_SPEED_OF + 1))
        self._speed += weight * (record.tokens_per_second - self._speed) if self._speed else record.tokens_per_second
        self._seconds += weight * (record.seconds - self._seconds) if self._seconds else record.seconds
        self._last = record
        if time.monotonic() - self._drawn > _SECONDS_BETWEEN_REFRESHES or record.step == self.steps:
            self._draw()

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self._print(f"step {step}: rolled back to step {start}: {reason}")

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._valid = f" · validation {record.loss:.4f}"
        self._print(f"step {record.step}: validation loss {record.loss:.4f}")
        self._draw()

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._print(f"step {step}: checkpoint {path}")

    def after_stop(self, step: int, reason: str) -> None:
        self._print(f"step {step}: stopped: {reason}")

    def after_fit(self) -> None:
        self.close()  # other callbacks print below it

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _draw(self) -> None:
        if self._progress is None or self._task is None or self._last is None:
            return
        left = clock((self.steps - self._last.step) * self._seconds)
        terms = "".join(f" · {name} {mean:.4f}" for name, mean in self._last.terms.items())
        speed = f"{self._speed:,.0f} {self._last.unit}/s"
        shown = f"loss {self._last.loss:.4f}{terms}{self._valid} · {speed} · {left} left"
        self._progress.update(self._task, completed=self._last.step, shown=shown, refresh=True)
        self._drawn = time.monotonic()

    def _print(self, line: str) -> None:
        if self._progress is not None:
            self._progress.console.print(line, soft_wrap=True, markup=False)
