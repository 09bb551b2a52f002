"""Kill ranks of a real run at chosen moments, which a training callback of the run, `Beacon`, reports."""

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord

LONGEST = 300.0
"""Seconds to wait for a moment before giving up."""


class Beacon(Callback):
    """Append `PROCESS KIND STEP` to the file `moments_RANK` of `folder` at each moment of a rank's run.

    Kinds at a beginning: start, step, evaluation, save. At an end: made, evaluated, saved, and staged, after which a
    save continues in the background.
    """

    ranks: ClassVar[Literal["first", "all"]] = "all"

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def setup(self, run: RunContext) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self.folder / f"moments_{run.mesh.rank}", flags, 0o644)

    def before_fit(self, start: int) -> None:
        self._tell("start", start)

    def before_step(self, step: int, batch: Any) -> None:
        self._tell("step", step)

    def after_step(self, record: StepRecord) -> None:
        self._tell("made", record.step)

    def before_evaluation(self, step: int) -> None:
        self._tell("evaluation", step)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._tell("evaluated", record.step)

    def before_checkpoint(self, step: int) -> None:
        self._tell("save", step)

    def after_staging(self, step: int) -> None:
        self._tell("staged", step)

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._tell("saved", step)

    def _tell(self, kind: str, step: int) -> None:
        os.write(self._file, f"{os.getpid()} {kind} {step}\n".encode())


@dataclass(frozen=True)
class Moment:
    pid: int
    kind: str
    step: int


def beacon(folder: Path) -> str:
    """Return the `threefold train` option that adds the callback."""
    folder.mkdir(exist_ok=True)
    return f"train.callbacks=[{{name: '{__file__}:Beacon', folder: '{folder}'}}]"


def moments(folder: Path, rank: int) -> list[Moment]:
    """Return all reports of a rank, in all attempts."""
    path = folder / f"moments_{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line.split() for line in lines if line.endswith("\n")]
    return [Moment(int(pid), kind, int(step)) for pid, kind, step in whole]


class Killer:
    """Kill ranks of `process`, a run with a `Beacon`, each time in a process that it has not killed before.

    Args:
        process: process of the run.
        folder: folder of the beacon.
        seed: seed of the moments.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path, seed: int) -> None:
        self.process, self.folder, self.chosen = process, folder, random.Random(seed)
        self.killed: list[tuple[int, Moment]] = []
        self._ended: set[int] = set()

    def kill(self, rank: int, kind: str, number: signal.Signals = signal.SIGKILL) -> Moment | None:
        """Send a signal to a rank within its next step, evaluation or save that is not a repetition.

        Returns None if the run has ended before.
        """
        furthest = max((moment.step for _, moment in self.killed), default=0)
        deadline = time.monotonic() + LONGEST
        while True:
            told = moments(self.folder, rank)
            found = next((each for each in reversed(told) if each.kind == kind), None)
            if found and told[-1] == found and found.pid not in self._ended and found.step > furthest:
                break
            if not self._goes_on(deadline):
                return None
        return self._send(rank, found, number, deadline)

    def _send(self, rank: int, moment: Moment, number: signal.Signals, deadline: float) -> Moment | None:
        # The delay is in ticks of the rank's processor time, so that no clock decides.
        until = ticks(moment.pid) + self.chosen.randrange(4)
        while ticks(moment.pid) < until and moments(self.folder, rank)[-1] == moment:
            if not self._goes_on(deadline):
                return None
        self._ended |= pids(self.folder)  # every rank reports its start before any begins a step
        try:
            os.kill(moment.pid, number)
        except ProcessLookupError:  # it was the end of the run
            return None
        self.killed.append((rank, moment))
        return moment

    def _goes_on(self, deadline: float) -> bool:
        return pause(self.process, deadline, f" after {self.killed}")


def pause(process: subprocess.Popen[str], deadline: float, told: str = "") -> bool:
    """Sleep briefly; return whether the run continues. After the deadline, kill it."""
    if time.monotonic() >= deadline:
        process.kill()  # and its ranks with it
        raise AssertionError(f"no such moment came{told}")
    try:
        process.wait(0.002)
    except subprocess.TimeoutExpired:
        return True
    return False


def ticks(pid: int) -> int:
    """Return the processor time of a process in ticks; far in the future if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 1 << 60
    return int(fields[11]) + int(fields[12])


def pids(folder: Path) -> set[int]:
    return {moment.pid for path in folder.glob("moments_*") for moment in moments(folder, int(path.name[8:]))}
