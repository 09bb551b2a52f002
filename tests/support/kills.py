"""Kills ranks of a real run at chosen moments of it, which the run's `Beacon` tells."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LONGEST = 300.0
"""Seconds after which a moment that has not come is taken for one that never will."""
BEACON = Path(__file__).with_name("beacon.py")


@dataclass(frozen=True)
class Moment:
    """What a rank has told last."""

    pid: int
    kind: str
    step: int


def beacon(folder: Path) -> str:
    """The option of `threefold train` that adds the callback."""
    folder.mkdir(exist_ok=True)
    return f"train.callbacks=[{{name: '{BEACON}:Beacon', folder: '{folder}'}}]"


def moments(folder: Path, rank: int) -> list[Moment]:
    """All that a rank has told, in all attempts."""
    path = folder / f"moments_{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line.split() for line in lines if line.endswith("\n")]
    return [Moment(int(pid), kind, int(step)) for pid, kind, step in whole]


class Killer:
    """Kills ranks of `process`, a run with a `Beacon`, each in a process that it has not killed before.

    Args:
        process: the run.
        folder: of the beacon.
        seed: of the moments.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path, seed: int) -> None:
        self.process, self.folder, self.chosen = process, folder, random.Random(seed)
        self.killed: list[tuple[int, Moment]] = []
        self._ended: set[int] = set()

    def kill(self, rank: int, kind: str, number: signal.Signals = signal.SIGKILL) -> Moment | None:
        """Send a signal to a rank somewhere in its next step, evaluation or save that is no repetition of one before.

        Returns None where the run has ended before.
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
        # as much work later as chosen: in ticks of the rank's own processor time, so that no clock decides
        until = ticks(moment.pid) + self.chosen.randrange(4)
        while ticks(moment.pid) < until and moments(self.folder, rank)[-1] == moment:
            if not self._goes_on(deadline):
                return None
        self._ended |= pids(self.folder)  # every rank has told its start before any begins a step
        try:
            os.kill(moment.pid, number)
        except ProcessLookupError:  # it was the end of the run
            return None
        self.killed.append((rank, moment))
        return moment

    def _goes_on(self, deadline: float) -> bool:
        return pause(self.process, deadline, f" after {self.killed}")


def pause(process: subprocess.Popen[str], deadline: float, told: str = "") -> bool:
    """Give way to others; returns whether the run still goes on. After the deadline it is killed."""
    if time.monotonic() >= deadline:
        process.kill()  # and with it its ranks
        raise AssertionError(f"no such moment came{told}")
    try:
        process.wait(0.002)
    except subprocess.TimeoutExpired:
        return True
    return False


def ticks(pid: int) -> int:
    """Processor time of a process in ticks; far in the future where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 1 << 60
    return int(fields[11]) + int(fields[12])


def pids(folder: Path) -> set[int]:
    """Of all ranks in all attempts."""
    return {moment.pid for path in folder.glob("moments_*") for moment in moments(folder, int(path.name[8:]))}


def assert_gone(pids: Iterable[int]) -> None:
    """No process of these ids runs (one may still be a zombie that nobody has waited for)."""
    for pid in pids:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
