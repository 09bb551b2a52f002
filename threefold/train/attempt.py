"""Attempt of a run: one start of all its ranks, how they agree to end it, and the ledger of the run's time.

A launcher may start the ranks again; what outlives an attempt are states in memory and the ledger. The ledger,
RUN/goodput.json, is overwritten in place after each step, evaluation and checkpoint, so it is valid whenever the
processes are killed. *Goodput* is the share of time in steps made for the first time, as defined in
https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity.

The ranks agree to end a run early, or to save a checkpoint, after the same step. A rank's request is one more element
of an all-reduce that each step and evaluation makes anyway. It needs no collective of its own, and every rank receives
it at the same point of its program. Only if a callback asked do the ranks also exchange the text of its reason.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from threefold.errors import UserError
from threefold.files import is_intact, read_text, seal_text, shown

if TYPE_CHECKING:
    from threefold.comm.mesh import Mesh
    from threefold.config import Config

COPIES: Final = 2
"""Number of copies of a rank's state in memory: one stays whole while the other is written."""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run.

    Attributes:
        number: starts by the same launcher before this one; 0 for the first attempt.
        most: maximum number of restarts.
        began: `time.time()` at the beginning of the start.
        failure: what ended the previous attempt, as a clause such as `rank 3 failed: …`; empty for the first.
        layout: fallback layout that the run continues in; empty for its own layout.
        memory: for each rank, the files in memory that hold its states (`memory_files`); empty if states are not kept.
    """

    number: int = 0
    most: int = 0
    began: float = field(default_factory=time.time)
    failure: str = ""
    layout: str = ""
    memory: tuple[tuple[Path, ...], ...] = ()

    def lines(self, start: str) -> list[str]:
        """Return the lines to print at the start of this attempt, given a sentence about its starting point."""
        if not self.number:
            return [f"{start}."] if start else []
        count = f"{self.number:,} of {self.most:,}" if self.most else f"{self.number:,}"
        why = f", as {self.failure}" if self.failure else ""
        layout = f" in layout {self.layout}" if self.layout else ""
        begin = start or "Starting again with step 1, as nothing was saved"
        return [f"Restart {count}{layout}{why}. {begin}."]


def memory_files(ranks: int) -> tuple[tuple[Path, ...], ...]:
    """Create empty files in memory for the states of `ranks` ranks, `COPIES` for each.

    They exist as long as this process or another one that opened them, so nothing is left when all are killed. Raises a
    `UserError` on systems without such files.
    """
    if sys.platform != "linux":
        raise UserError("checkpoint.memory_every is not 0 but needs files in memory, which only Linux has; use 0.")
    return tuple(
        tuple(Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(f'threefold-rank-{rank}')}") for _ in range(COPIES))
        for rank in range(ranks)
    )


def fresh_files(files: tuple[tuple[Path, ...], ...]) -> tuple[tuple[Path, ...], ...]:
    """Close these files, whose states are not to be trusted, and create as many empty ones."""
    for each in files:
        for file in each:
            os.close(int(file.name))
    return memory_files(len(files)) if files else ()


GOODPUT_FILE: Final = "goodput.json"
LEDGER_SIZE: Final = 1024
"""Bytes of the ledger, which lie in one page of the kernel's cache: a kill leaves either the old or the new content."""


@dataclass
class Goodput:
    """Seconds of a run over its attempts, without the time between two commands.

    Attributes:
        steps: seconds in steps made for the first time.
        repeated: seconds in steps made again after a restart or after resuming from an older checkpoint.
        evaluating: seconds in evaluations.
        saving: seconds that steps waited for checkpoints.
        starting: seconds from the start of a command to its first step.
        lost: seconds from the last event before each failure to the first step after it.
        total: seconds of all of these, and of everything in between, such as callbacks.
        attempts: starts of all ranks.
        restarts: starts by a launcher after a failure.
        step: last step that the newest attempt finished, or its starting point.
        furthest: last step that any attempt finished.
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
    def share(self) -> float:
        """The goodput, from 0 to 1."""
        return self.steps / self.total if self.total > 0 else 0.0

    def seconds(self) -> dict[str, float]:
        """Return the parts and the total, rounded to milliseconds."""
        names = ("steps", "repeated", "evaluating", "saving", "starting", "lost", "total")
        return {name: round(getattr(self, name), 3) for name in names}

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the ledger from a file; None if there is none, or it is damaged."""
        try:
            text = read_text(path).rstrip() + "\n"
            if not is_intact(text):
                return None
            held = json.loads(text)
            values = {each.name: held[each.name] for each in fields(cls)}
            if not all(type(value) in (int, float) for value in values.values()):
                return None
            return cls(**values)
        except (UserError, ValueError, KeyError, TypeError):
            return None

    def text(self) -> bytes:
        """Return the file's content, always of the same size."""
        return seal_text(json.dumps(asdict(self), indent=2)).encode().ljust(LEDGER_SIZE - 1) + b"\n"


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


_FIRST_SAVE: Final = 100e6
"""Assumed speed of the first save in bytes per second, until one has been measured."""


class RunClock:
    """Clock of the first rank that makes saves and the end of the run due; the ranks agree in a step's collective.

    The run ends early enough for twice the longest pause between two queries, plus the longest save so far.

    Args:
        config: resolved config.
        began: start of the run in `time.time` seconds.
        save_ended: returns whether the checkpoint written in the background is complete or has failed; None if none is.

    Attributes:
        limit: the setting that ends the run, with its value.
        longest_save: seconds of the longest save, updated by `saved`.
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
        """Begin to count to the first save, of a checkpoint of this size, now that there is a state to save."""
        self._saved, self.longest_save = time.monotonic(), 1.0 + state_bytes / _FIRST_SAVE

    def saving(self) -> None:
        self._saved = time.monotonic()

    def saved(self, seconds: float) -> None:
        """Note that a save took this many seconds."""
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
    """Agreement of all ranks on whether the run is to end.

    Args:
        asked: returns the number of the signal that asked this rank to end the run, 0 for none.
        run_dir: folder of the run; None if there is none.
        watches: whether this rank checks that the folder still exists.
        clock: clock of the first rank; None on other ranks.

    Attributes:
        signal: agreed number of the signal that ends the run, 0 for none.
        is_due: whether the ranks agreed to end the run, by a signal, a callback's reason or the time limit.
        save_is_due: whether the ranks agreed that a checkpoint is due by the clock; the training loop resets it.
        save_ended: whether the ranks agreed that the background checkpoint is written; the training loop resets it.
    """

    def __init__(
        self,
        asked: Callable[[], int] = lambda: 0,
        run_dir: Path | None = None,
        watches: bool = False,
        clock: RunClock | None = None,
    ) -> None:
        self._clock = clock
        self.save_is_due, self.save_ended, self._limited = False, False, False
        self._asked, self._run_dir = asked, run_dir
        self._watched = run_dir if watches else None
        self._identity = _identity(self._watched) if self._watched else None
        self._reason: str | None = None
        self.signal = 0
        self.is_due = False

    def ask(self, reason: str) -> None:
        """Ask from this rank to end the run; the ranks agree in their next all-reduce."""
        self._reason = self._reason or " ".join(reason.split())[:_LONGEST_REASON] or "no reason was given"

    def request(self) -> float:
        """Return this rank's term of the all-reduce."""
        if self._watched is not None and _identity(self._watched) != self._identity:
            return _FOLDER_LOST
        term, asked = 0.0, self._asked()
        if asked:
            term += _INTERRUPT if asked == signal.SIGINT else _TERMINATE
        if self._reason is not None:
            term += _REASON
        if (clock := self._clock) is not None:
            term += _SAVE_DUE if not self.save_is_due and clock.save_is_due() else 0.0
            term += _TIME_UP if clock.time_is_up() else 0.0
            if clock.save_ended is not None and not self.save_ended and clock.save_ended():
                term += _SAVED
        return term

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

    def agree(self, mesh: "Mesh") -> bool:
        """All-reduce the requests now, and return `is_due`. Collective over the world."""
        import torch  # not needed by a launcher

        request = torch.tensor([self.request()], dtype=torch.float64, device=mesh.device)
        self.receive(mesh.world.all_reduce_(request).item())
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


def _holds(requests: float, flag: float) -> bool:
    """Return whether a sum of requests contains a flag that only one rank sets."""
    return requests // flag % 2 == 1


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_dev, found.st_ino
