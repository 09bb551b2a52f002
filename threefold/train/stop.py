"""Early stop: the ranks of a run agree to end it after the same step.

A rank's request is one more element of an all-reduce that each step and each evaluation does anyway, so it needs no
collective of its own, and every rank receives it at the same point of its program.
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

# Powers far enough apart that a sum over up to 2^16 ranks shows which of them it contains.
_INTERRUPT, _TERMINATE, _FOLDER_LOST = 1.0, float(1 << 16), float(1 << 32)


@dataclass(frozen=True)
class Stopped:
    """A run that a signal ended before its last step.

    Attributes:
        signal: SIGINT or SIGTERM.
        step: updates made.
    """

    signal: int
    step: int


class Stop:
    """Whether the run is to end, agreed on by all ranks.

    Args:
        asked: the number of the signal that asked this rank to end the run, 0 for none.
        run_dir: the run's folder; None where there is none.
        watches: whether this rank checks that the folder still exists.

    Attributes:
        signal: what the ranks agreed on: the number of the signal that ends the run, 0 to continue.
    """

    def __init__(
        self, asked: Callable[[], int] = lambda: 0, run_dir: Path | None = None, watches: bool = False
    ) -> None:
        self._asked, self._run_dir = asked, run_dir
        self._watched = run_dir if watches else None
        self._identity = _identity(self._watched) if self._watched else None
        self.signal = 0

    def request(self) -> float:
        """This rank's summand of the all-reduce."""
        if self._watched is not None and _identity(self._watched) != self._identity:
            return _FOLDER_LOST
        asked = self._asked()
        return 0.0 if not asked else _INTERRUPT if asked == signal.SIGINT else _TERMINATE

    def receive(self, requests: float) -> None:
        """Set `signal` from the sum of all ranks' requests.

        Raises:
            UserError: on every rank, when the run's folder is gone.
        """
        if requests >= _FOLDER_LOST:
            name = f" {shown(self._run_dir)}" if self._run_dir else ""
            raise UserError(
                f"The run's folder{name} was deleted or replaced while the run was writing to it, so the run ends "
                "here without a checkpoint; start it again."
            )
        if requests:
            self.signal = signal.SIGTERM if requests >= _TERMINATE else signal.SIGINT

    def agree(self, mesh: Mesh) -> int:
        """All-reduce the requests now, and return `signal`. Collective over the world."""
        request = torch.tensor([self.request()], dtype=torch.float64, device=mesh.device)
        self.receive(mesh.world.all_reduce_(request).item())
        return self.signal


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode number of a folder; None if it does not exist."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino
