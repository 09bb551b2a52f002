"""Live line of a run at the bottom of a terminal."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.train.callbacks.base import Callback, RunContext, clock, on_terminal
from threefold.train.callbacks.records import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SPEED_OF = 20
"""Span, in steps, of the exponential average of the displayed speed."""
_SECONDS_BETWEEN_REFRESHES = 0.1


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
