"""Early stop: the ranks of a run agree to end it after the same step, or to save a checkpoint after it.

A rank's request is one more element of an all-reduce that each step and each evaluation does anyway, so it needs no
collective of its own, and every rank receives it at the same point of its program. Only where a callback asked do the
ranks then exchange the text of its reason.
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

# Powers far enough apart that a sum over up to 2^16 ranks shows which of them it contains; exact in fp64. Only one rank
# watches the folder and the clock.
_INTERRUPT, _TERMINATE, _REASON = 1.0, float(1 << 16), float(1 << 32)
_FOLDER_LOST, _SAVE_DUE, _TIME_UP, _SAVED = (float(1 << bit) for bit in (49, 50, 51, 52))
_LONGEST_REASON = 1000
"""Characters of a reason that are exchanged."""


@dataclass(frozen=True)
class Stopped:
    """A run that a signal, a callback or its time limit ended before its last step.

    Attributes:
        signal: SIGINT or SIGTERM; 0 where something else ended it.
        step: updates made.
        reason: the callback's; empty where something else ended it.
        limit: the time limit that ended it, as its setting and value; empty where something else did.
    """

    signal: int
    step: int
    reason: str = ""
    limit: str = ""


class Clock(Protocol):
    """What the first rank's clock asks of the run."""

    limit: str

    def save_is_due(self) -> bool:
        """Whether a checkpoint is due by the clock."""
        ...

    def time_is_up(self) -> bool:
        """Whether the run has to end now, to be done within its time limit."""
        ...

    def save_ended(self) -> bool:
        """Whether a checkpoint that was written in the background is complete now."""
        ...


class Stop:
    """Whether the run is to end, agreed on by all ranks.

    Args:
        asked: the number of the signal that asked this rank to end the run, 0 for none.
        run_dir: the run's folder; None where there is none.
        watches: whether this rank checks that the folder still exists.

    Attributes:
        signal: what the ranks agreed on: the number of the signal that ends the run, 0 where none does.
        is_due: whether they agreed to end the run, for a signal, a callback's reason or its time limit.
        save_is_due: whether they agreed that a checkpoint is due by the clock; to be reset where it is saved.
        save_ended: whether they agreed that the checkpoint in the background is complete; to be reset likewise.
        evaluation_missed: whether the end of the run came before an evaluation that was due, for the last checkpoint.
        clock: of the first rank, where there is one; the others have None.
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
        """Ask to end the run, from this rank alone; the ranks agree on it at their next all-reduce."""
        self._reason = self._reason or " ".join(reason.split())[:_LONGEST_REASON] or "no reason was given"

    def request(self) -> float:
        """This rank's summand of the all-reduce."""
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
        """Set `signal` and `is_due` from the sum of all ranks' requests.

        Raises:
            UserError: on every rank, when the run's folder is gone.
        """
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
        """How the run ended after `step` updates: of the reasons of several ranks that of the lowest rank, and of a
        signal, a reason and the time limit the first. Collective over the world, once `is_due`."""
        if self.signal:
            return Stopped(self.signal, step)
        told = mesh.world.gather_objects((self._reason, "" if self.clock is None else self.clock.limit))
        reasons = [reason for reason, _ in told if reason is not None]
        return Stopped(0, step, reasons[0]) if reasons else Stopped(0, step, limit=told[0][1])


def _holds(requests: float, flag: float) -> bool:
    """Whether a sum of requests has a flag that one rank alone sets."""
    return requests // flag % 2 == 1


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode number of a folder; None if it does not exist."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino
