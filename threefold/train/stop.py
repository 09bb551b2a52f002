"""Early stop: the ranks of a run agree to end it after the same step.

A rank's request is one more element of an all-reduce that each step and each evaluation does anyway, so it needs no
collective of its own, and every rank receives it at the same point of its program. Only where a callback asked do the
ranks then exchange the text of its reason.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.files import shown

# Powers far enough apart that a sum over up to 2^16 ranks shows which of them it contains; exact in fp64. Only one rank
# watches the folder.
_INTERRUPT, _TERMINATE, _REASON, _FOLDER_LOST = 1.0, float(1 << 16), float(1 << 32), float(1 << 49)
_LONGEST_REASON = 1000
"""Characters of a reason that are exchanged."""


@dataclass(frozen=True)
class Stopped:
    """A run that a signal or a callback ended before its last step.

    Attributes:
        signal: SIGINT or SIGTERM; 0 where a callback ended it.
        step: updates made.
        reason: the callback's; empty where a signal ended it.
    """

    signal: int
    step: int
    reason: str = ""


class Stop:
    """Whether the run is to end, agreed on by all ranks.

    Args:
        asked: the number of the signal that asked this rank to end the run, 0 for none.
        run_dir: the run's folder; None where there is none.
        watches: whether this rank checks that the folder still exists.

    Attributes:
        signal: what the ranks agreed on: the number of the signal that ends the run, 0 where none does.
        is_due: whether they agreed to end the run, for a signal or a callback's reason.
    """

    def __init__(
        self, asked: Callable[[], int] = lambda: 0, run_dir: Path | None = None, watches: bool = False
    ) -> None:
        self._asked, self._run_dir = asked, run_dir
        self._watched = run_dir if watches else None
        self._identity = _identity(self._watched) if self._watched else None
        self._reason: str | None = None
        self.signal = 0
        self.is_due = False

    def ask(self, reason: str) -> None:
        """Ask to end the run, from this rank alone; the ranks agree on it at their next all-reduce."""
        self._reason = self._reason or " ".join(reason.split())[:_LONGEST_REASON] or "no reason was given"

    def request(self) -> float:
        """This rank's summand of the all-reduce."""
        if self._watched is not None and _identity(self._watched) != self._identity:
            return _FOLDER_LOST
        reason = 0.0 if self._reason is None else _REASON
        asked = self._asked()
        return reason + (0.0 if not asked else _INTERRUPT if asked == signal.SIGINT else _TERMINATE)

    def receive(self, requests: float) -> None:
        """Set `signal` and `is_due` from the sum of all ranks' requests.

        Raises:
            UserError: on every rank, when the run's folder is gone.
        """
        if requests >= _FOLDER_LOST:
            name = f" {shown(self._run_dir)}" if self._run_dir else ""
            raise UserError(
                f"The run's folder{name} was deleted or replaced while the run was writing to it, so the run ends "
                "here without a checkpoint; start it again."
            )
        signals = requests % _REASON
        if signals:
            self.signal = signal.SIGTERM if signals >= _TERMINATE else signal.SIGINT
        self.is_due = self.is_due or requests > 0

    def agree(self, mesh: Mesh) -> bool:
        """All-reduce the requests now, and return `is_due`. Collective over the world."""
        request = torch.tensor([self.request()], dtype=torch.float64, device=mesh.device)
        self.receive(mesh.world.all_reduce_(request).item())
        return self.is_due

    def result(self, mesh: Mesh, step: int) -> Stopped:
        """How the run ended after `step` updates: of the reasons of several ranks that of the lowest rank, and of a
        signal and a reason the signal. Collective over the world, once `is_due`."""
        if self.signal:
            return Stopped(self.signal, step)
        reasons = mesh.world.gather_objects(self._reason)
        return Stopped(0, step, next(reason for reason in reasons if reason is not None))


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode number of a folder; None if it does not exist."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino
