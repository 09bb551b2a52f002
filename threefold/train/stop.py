"""Agreement of all ranks to end a run early, or to save a checkpoint, after the same step.

A rank's requests are more elements of an all-reduce that each step and evaluation makes anyway. They need no collective
of their own, and every rank receives them at the same point of its program. Only if a callback asked do the ranks also
exchange the text of its reason.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from threefold.errors import UserError
from threefold.files import shown

if TYPE_CHECKING:
    from torch import Tensor

    from threefold.comm.mesh import Mesh
    from threefold.config import Config

_LONGEST_REASON = 1000  # maximum number of characters of a reason that are exchanged


class Requests(NamedTuple):
    """Requests of a rank, or how many ranks made each: elements of an all-reduce, in this order."""

    folder_lost: float = 0.0  # like the next three, of the rank that watches the folder and the clock
    save_due: float = 0.0
    save_ended: float = 0.0
    time_up: float = 0.0
    interrupt: float = 0.0
    terminate: float = 0.0
    reason: float = 0.0


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


_FIRST_SAVE: Final = 100e6  # assumed speed of the first save in bytes per second, until one has been measured


class RunClock:
    """Clock of the first rank, which decides when saves and the end of the run are due; a step's collective shares it.

    The run ends early enough for twice the longest pause between two queries, plus the longest save so far.

    Args:
        began: start of the run in `time.time` seconds.
        save_ended: returns whether the checkpoint written in the background is complete or has failed; None if none is.

    Attributes:
        limit: the setting that ends the run, with its value.
    """

    def __init__(self, config: "Config", began: float, save_ended: Callable[[], bool] | None = None) -> None:
        self._every, seconds = config.checkpoint.every_seconds, config.train.max_seconds
        self.limit = f"train.max_seconds {seconds:g}" if seconds else ""
        self._end = None if seconds is None else time.monotonic() + seconds - (time.time() - began)
        self.save_ended = save_ended
        self._saved = time.monotonic()
        self._measured, self.longest_save = False, 1.0
        self._asked: float | None = None
        self._longest_pause = 0.0

    def begin(self, state_bytes: int) -> None:
        """Start timing the first save, of a checkpoint of this size, now that there is a state to save."""
        self._saved, self.longest_save = time.monotonic(), 1.0 + state_bytes / _FIRST_SAVE

    def saving(self) -> None:
        self._saved = time.monotonic()

    def saved(self, seconds: float) -> None:
        self.longest_save = max(self.longest_save, seconds) if self._measured else seconds
        self._measured = True

    def save_is_due(self) -> bool:
        """Return whether `checkpoint.every_seconds` have passed since the last save began."""
        return self._every is not None and time.monotonic() - self._saved >= self._every

    def time_is_up(self) -> bool:
        """Return whether the run must end now; call it once per step and during evaluations."""
        if self._end is None:
            return False
        now = time.monotonic()
        if self._asked is not None:
            self._longest_pause = max(self._longest_pause, now - self._asked)
        self._asked = now
        return now + 2 * self._longest_pause + self.longest_save >= self._end


class Stop:
    """Agreement of all ranks on whether the run must end.

    Args:
        asked: returns the number of the signal that asked this rank to end the run, 0 for none.
        run_dir: folder of the run; None if there is none.
        clock: clock of the first rank, which also checks that the folder still exists; None on other ranks.

    Attributes:
        signal: agreed number of the signal that ends the run, 0 for none.
        is_due: whether the ranks agreed to end the run, by a signal, a callback's reason or the time limit.
        save_is_due: whether the ranks agreed that a checkpoint is due by the clock; the training loop resets it.
        save_ended: whether the ranks agreed that the background checkpoint is written; the training loop resets it.
    """

    def __init__(
        self, asked: Callable[[], int] = lambda: 0, run_dir: Path | None = None, clock: RunClock | None = None
    ) -> None:
        self._asked, self._run_dir, self._clock = asked, run_dir, clock
        self.signal = 0
        self._reason: str | None = None
        self.is_due = self.save_is_due = self.save_ended = False
        self._watched = None if clock is None else run_dir
        self._identity = _identity(self._watched) if self._watched else None

    def ask(self, reason: str) -> None:
        """Ask from this rank to end the run; the ranks agree in their next all-reduce."""
        self._reason = self._reason or " ".join(reason.split())[:_LONGEST_REASON] or "no reason was given"

    def requests(self) -> Requests:
        """Return this rank's terms of the all-reduce."""
        if self._watched is not None and _identity(self._watched) != self._identity:
            return Requests(folder_lost=1.0)
        asked, clock = self._asked(), self._clock
        ended = None if clock is None or self.save_ended else clock.save_ended
        return Requests(
            save_due=float(clock is not None and not self.save_is_due and clock.save_is_due()),
            save_ended=float(ended is not None and ended()),
            time_up=float(clock is not None and clock.time_is_up()),
            interrupt=float(asked == signal.SIGINT),
            terminate=float(asked not in (0, signal.SIGINT)),
            reason=float(self._reason is not None),
        )

    def receive(self, found: Requests) -> None:
        """Update the agreed attributes from the sum of all requests; raise a `UserError` if the folder is gone."""
        if found.folder_lost:
            name = f" {shown(self._run_dir)}" if self._run_dir else ""
            raise UserError(
                f"The run's folder{name} was deleted or replaced while the run was writing to it, so the run ends "
                "here without a checkpoint; start it again."
            )
        if found.terminate or found.interrupt:
            self.signal = signal.SIGTERM if found.terminate else signal.SIGINT
        self.save_is_due |= bool(found.save_due)
        self.save_ended |= bool(found.save_ended)
        self.is_due |= any((found.time_up, found.interrupt, found.terminate, found.reason))

    def agree(self, mesh: "Mesh") -> bool:
        """All-reduce the requests now, and return `is_due`. Collective over the world."""
        import torch  # not needed by a launcher

        requests = torch.tensor(self.requests(), dtype=torch.float64, device=mesh.device)
        self.receive(Requests(*mesh.world.all_reduce_values(requests)))
        return self.is_due

    def result(self, mesh: "Mesh", step: int) -> Stopped:
        """Return how the run ended after `step` updates, once `is_due`; collective over the world.

        A signal takes precedence over a reason, and a reason over the time limit; the lowest rank's reason is used.
        """
        if self.signal:
            return Stopped(self.signal, step)
        told = mesh.world.gather_objects((self._reason, "" if self._clock is None else self._clock.limit))
        reasons = [reason for reason, _ in told if reason is not None]
        return Stopped(0, step, reasons[0]) if reasons else Stopped(0, step, limit=told[0][1])


def sum_over_ranks(totals: "Tensor", mesh: "Mesh", stop: Stop | None) -> list[float]:
    """Sum numbers over all ranks; the requests to end the run travel in the same small collective."""
    if stop is None:
        return mesh.world.all_reduce_values(totals)
    import torch  # not needed by a launcher

    requests = totals.new_zeros(len(Requests._fields))
    for place, asked in enumerate(stop.requests()):
        if asked:
            requests[place].fill_(asked)  # on the device: copying a tensor from a Python number would block the host
    summed = mesh.world.all_reduce_values(torch.cat([totals, requests]))
    stop.receive(Requests(*summed[len(totals) :]))
    return summed[: len(totals)]


def _identity(folder: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(folder)
        return found.st_dev, found.st_ino
    return None
