"""Goodput: the callback that keeps the ledger of a run's time, RUN/goodput.json (`threefold.train.attempt`)."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from threefold.output import replace_link
from threefold.train.attempt import GOODPUT_FILE, LEDGER_SIZE, Attempt, Goodput
from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord, WriteFailures


class GoodputLedger(Callback):
    """Write the goodput ledger of a run. A failure to write is reported once."""

    @classmethod
    def for_run(cls, run: RunContext) -> Callback:
        return cls(run.run_dir / GOODPUT_FILE, run.attempt)

    def __init__(self, path: Path, attempt: Attempt) -> None:
        self.path, self.attempt, self._failures = path, attempt, WriteFailures(path)
        self.goodput = Goodput()
        self._last, self._started = time.perf_counter(), False
        self._descriptor: int | None = None
        self._saving = False

    def before_fit(self, start: int) -> None:
        known = Goodput.read(self.path) if start or self.attempt.number else None
        self.goodput = goodput = known or Goodput()
        goodput.attempts += 1
        goodput.restarts += self.attempt.number > 0
        goodput.step, goodput.furthest = start, max(start, goodput.furthest)
        if not self.attempt.number:
            goodput.at = self.attempt.began
        with self._failures:
            # Non-blocking, as a FIFO of this name would block the run.
            self._descriptor = os.open(replace_link(self.path), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
            os.ftruncate(self._descriptor, LEDGER_SIZE)
        self._write()

    def before_step(self, step: int, batch: Any) -> None:
        if not self._started:
            self._start()

    def after_step(self, record: StepRecord) -> None:
        passed, goodput = self._pass(), self.goodput
        spent = min(passed, record.seconds - record.phases.get("callbacks", 0.0))
        if record.step > goodput.furthest:
            goodput.steps += spent
        else:
            goodput.repeated += spent
        goodput.step, goodput.furthest = record.step, max(record.step, goodput.furthest)
        self._write()

    def before_evaluation(self, step: int) -> None:
        self._pass()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.goodput.evaluating += self._pass()
        self._write()

    def before_checkpoint(self, step: int) -> None:
        if not self._started:  # stopped before the first step
            self._start()
        self._pass()
        self._saving = True

    def after_staging(self, step: int) -> None:
        self._saved()

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._saved()
        self._write()

    def after_fit(self) -> None:
        if self._started:
            self._pass()
            self._write()

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _saved(self) -> None:
        """Count the time that the steps waited for a checkpoint; the rest of it may be written in the background."""
        if self._saving:
            self.goodput.saving += self._pass()
        self._saving = False

    def _start(self) -> None:
        goodput, self._started = self.goodput, True
        restarted = self.attempt.number and goodput.at
        passed = max(0.0, time.time() - (goodput.at if restarted else self.attempt.began))
        goodput.total += passed
        if restarted:
            goodput.lost += passed
        else:
            goodput.starting += passed
        self._last = time.perf_counter()

    def _pass(self) -> float:
        """Add the time since the last event to the total, and return it."""
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        self.goodput.total += passed
        return passed

    def _write(self) -> None:
        """Overwrite the file; until the first step the last event stays, so a failing attempt loses the time since."""
        if self._started:
            self.goodput.at = time.time()
        if self._descriptor is not None:
            with self._failures:
                os.pwrite(self._descriptor, self.goodput.text(), 0)
