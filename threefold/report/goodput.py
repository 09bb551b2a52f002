"""Ledger of a run's time over all its attempts, and its goodput.

The ledger, RUN/goodput.json, is overwritten in place after each step, evaluation and checkpoint, so it is valid
whenever the processes are killed. *Goodput* is the fraction of time in steps made for the first time, as defined in
https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from threefold.checksums import is_intact, seal_text
from threefold.errors import UserError
from threefold.files import counted, load_json
from threefold.foreign import FolderFiles, open_nofollow
from threefold.report.door import GOODPUT_FILE
from threefold.train.attempt import Attempt
from threefold.train.callbacks.base import Callback, RunContext
from threefold.train.callbacks.records import EvaluationRecord, StepRecord
from threefold.train.callbacks.step_log import WriteFailures

LEDGER_SIZE: Final = 1024
"""Bytes of the ledger, which lie in one page of the kernel's cache: a kill leaves either the old or the new content."""


@dataclass
class Goodput:
    """Seconds of a run over its attempts, without the time between two commands.

    Attributes:
        steps: seconds in steps made for the first time.
        repeated: seconds in steps made again after a restart or after resuming from an older checkpoint.
        saving: seconds that steps waited for checkpoints.
        starting: seconds from the start of a command to its first step.
        lost: seconds from the last event before each failure to the first step after it.
        total: seconds of all of these, and of everything in between, such as callbacks.
        attempts, restarts: starts of all ranks, and those by a launcher after a failure.
        step, furthest: last step that the newest attempt finished (or its starting point), and that any finished.
        at: `time.time()` of the last event.
    """

    steps: float = 0.0
    repeated: float = 0.0
    evaluating: float = 0.0
    saving: float = 0.0
    starting: float = 0.0
    lost: float = 0.0
    total: float = 0.0
    attempts: int = 0
    restarts: int = 0
    step: int = 0
    furthest: int = 0
    at: float = 0.0

    @property
    def fraction(self) -> float:
        """The goodput, from 0 to 1."""
        return self.steps / self.total if self.total > 0 else 0.0

    def seconds(self) -> dict[str, float]:
        """Return the parts and the total, rounded to milliseconds."""
        names = ("steps", "repeated", "evaluating", "saving", "starting", "lost", "total")
        return {name: round(getattr(self, name), 3) for name in names}

    def __str__(self) -> str:
        """Return it on one line, with the parts that it is made of."""
        parts = {"steps": self.steps, "repeated steps": self.repeated, "evaluations": self.evaluating}
        parts |= {"saving": self.saving, "starting": self.starting, "lost to restarts": self.lost}
        listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
        restarts = f", {counted(self.restarts, 'restart')}" if self.restarts else ""
        return f"{self.fraction:.1%} of {self.total:,.1f} s{restarts} ({listed})"

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the ledger from a file; None if there is none, or it is damaged."""
        try:
            text = FolderFiles(path.parent).text(path.name, limit=1 << 16).rstrip() + "\n"
            if not is_intact(text):
                return None
            held = load_json(text)
            values = {each.name: held[each.name] for each in fields(cls)}
            return cls(**values) if all(type(value) in (int, float) for value in values.values()) else None
        except (UserError, ValueError, KeyError, TypeError):
            return None

    def text(self) -> bytes:
        """Return the file's content, always of the same size."""
        return seal_text(json.dumps(asdict(self), indent=2)).encode().ljust(LEDGER_SIZE - 1) + b"\n"


def goodput_of(run_dir: Path) -> Goodput | None:
    """Return the goodput of a run so far; None if nothing is known of it."""
    return Goodput.read(run_dir / GOODPUT_FILE)


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
            self._descriptor = open_nofollow(self.path, 0)
            os.ftruncate(self._descriptor, LEDGER_SIZE)
        self._write()

    def before_step(self, step: int, batch: Any) -> None:
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
        self._start()  # if the run is stopped before its first step
        self._pass()
        self._saving = True

    def after_staging(self, step: int) -> None:
        """Count the time that the steps waited for a checkpoint; the rest of it may be written in the background."""
        if self._saving:
            self.goodput.saving += self._pass()
        self._saving = False

    def after_checkpoint(self, step: int, path: Path) -> None:
        self.after_staging(step)
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

    def _start(self) -> None:
        """Count the time before the first step; do nothing after it."""
        if self._started:
            return
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
