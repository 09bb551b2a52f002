"""Early stop: the ranks of a run agree to end it, or to save a checkpoint, after the same step.

A rank's request is one more element of an all-reduce that each step and evaluation makes anyway. It needs no collective
of its own, and every rank receives it at the same point of its program. Only if a callback asked do the ranks also
exchange the text of its reason.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.files import shown

# Powers far enough apart to be recognized in a sum over up to 2^16 ranks; exact in fp64. Only one rank watches the
# folder and the clock.
_INTERRUPT, _TERMINATE, _REASON = 1.0, float(1 << 16), float(1 << 32)
_FOLDER_LOST, _SAVE_DUE, _TIME_UP, _SAVED = (float(1 << bit) for bit in (49, 50, 51, 52))
_LONGEST_REASON = 1000
"""Maximum number of characters of a reason that are exchanged."""


@dataclass(frozen=True)
class Stopped:
    """Early end of a run by a signal, a callback or its time limit.

    Attributes:
        signal: SIGINT or SIGTERM; 0 for another cause.
        step: updates made.
        reason: reason given by a callback; empty for another cause.
        limit: setting and value of the time limit; empty for another cause.
    """

    signal: int
    step: int
    reason: str = ""
    limit: str = ""


class Clock(Protocol):
    """Clock of the first rank, which decides what is due by time."""

    limit: str

    def save_is_due(self) -> bool:
        """Return whether a checkpoint is due by the clock."""
        ...

    def time_is_up(self) -> bool:
        """Return whether the run must end now to stay within its time limit."""
        ...

    def save_ended(self) -> bool:
        """Return whether the checkpoint written in the background is complete now."""
        ...


class Stop:
    """Agreement of all ranks on whether the run is to end.

    Args:
        asked: returns the number of the signal that asked this rank to end the run, 0 for none.
        run_dir: folder of the run; None if there is none.
        watches: whether this rank checks that the folder still exists.

    Attributes:
        signal: agreed number of the signal that ends the run, 0 for none.
        is_due: whether the ranks agreed to end the run, by a signal, a callback's reason or the time limit.
        save_is_due: whether the ranks agreed that a checkpoint is due by the clock; reset by whoever saves it.
        save_ended: whether the ranks agreed that the background checkpoint is complete; reset by whoever finishes it.
        evaluation_missed: whether the run ended before an evaluation that was due; stored in the last checkpoint.
        clock: clock of the first rank, if any; None on other ranks.
    """

    def __init__(
        self, asked: Callable[[], int] = lambda: 0, run_dir: Path | None = None, watches: bool = False
    ) -> None:
        self.clock: Clock | None = None
        self.save_is_due, self.save_ended, self._limited = False, False, False
        self._asked, self._run_dir = asked, run_dir
        self._watched = run_dir if watches else None
        self._identity = _identity(self._watched) if self._watched else None
        self._reason: str | None = None
        self.signal = 0
        self.is_due = False
        self.evaluation_missed = False

    def ask(self, reason: str) -> None:
        """Ask from this rank to end the run; the ranks agree in their next all-reduce."""
        self._reason = self._reason or " ".join(reason.split())[:_LONGEST_REASON] or "no reason was given"

    def request(self) -> float:
        """Return this rank's term of the all-reduce."""
        if self._watched is not None and _identity(self._watched) != self._identity:
            return _FOLDER_LOST
        reason = 0.0 if self._reason is None else _REASON
        asked = self._asked()
        return self._by_clock() + reason + (0.0 if not asked else _INTERRUPT if asked == signal.SIGINT else _TERMINATE)

    def _by_clock(self) -> float:
        clock = self.clock
        if clock is None:
            return 0.0
        due = _SAVE_DUE if not self.save_is_due and clock.save_is_due() else 0.0
        up = _TIME_UP if clock.time_is_up() else 0.0
        return due + up + (_SAVED if not self.save_ended and clock.save_ended() else 0.0)

    def receive(self, requests: float) -> None:
        """Update the agreed attributes from the sum of all requests; raise a `UserError` if the folder is gone."""
        if _holds(requests, _FOLDER_LOST):
            name = f" {shown(self._run_dir)}" if self._run_dir else ""
            raise UserError(
                f"The run's folder{name} was deleted or replaced while the run was writing to it, so the run ends "
                "here without a checkpoint; start it again."
            )
        signals = requests % _REASON
        if signals:
            self.signal = signal.SIGTERM if signals >= _TERMINATE else signal.SIGINT
        self._limited = self._limited or _holds(requests, _TIME_UP)
        self.save_is_due = self.save_is_due or _holds(requests, _SAVE_DUE)
        self.save_ended = self.save_ended or _holds(requests, _SAVED)
        self.is_due = self.is_due or self._limited or requests % _FOLDER_LOST > 0

    def agree(self, mesh: Mesh) -> bool:
        """All-reduce the requests now, and return `is_due`. Collective over the world."""
        request = torch.tensor([self.request()], dtype=torch.float64, device=mesh.device)
        self.receive(mesh.world.all_reduce_(request).item())
        return self.is_due

    def result(self, mesh: Mesh, step: int) -> Stopped:
        """Return how the run ended after `step` updates, once `is_due`; collective over the world.

        A signal takes precedence over a reason, and a reason over the time limit; the lowest rank's reason is used.
        """
        if self.signal:
            return Stopped(self.signal, step)
        told = mesh.world.gather_objects((self._reason, "" if self.clock is None else self.clock.limit))
        reasons = [reason for reason, _ in told if reason is not None]
        return Stopped(0, step, reasons[0]) if reasons else Stopped(0, step, limit=told[0][1])


def _holds(requests: float, flag: float) -> bool:
    """Return whether a sum of requests contains a flag that only one rank sets."""
    return requests // flag % 2 == 1


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino
