"""Kill ranks of a real run at chosen moments, which the run's `Beacon` reports."""

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

LONGEST = 300.0
"""Seconds to wait for a moment before giving up."""
BEACON = Path(__file__).with_name("beacon.py")


@dataclass(frozen=True)
class Moment:
    pid: int
    kind: str
    step: int


def beacon(folder: Path) -> str:
    """Return the `threefold train` option that adds the callback."""
    folder.mkdir(exist_ok=True)
    return f"train.callbacks=[{{name: '{BEACON}:Beacon', folder: '{folder}'}}]"


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
