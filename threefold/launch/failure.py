"""Failures of ranks, and which of several was the first cause."""

import pickle
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from threefold.errors import HardwareFault, ProcessFault, UserError
from threefold.launch.device import explain_allocation
from threefold.launch.output import log_file
from threefold.launch.process import signal_name

REPORTS: Final = "failures"
"""The count in a launcher's store by which its ranks agree on the one that reports a failure."""


class RankFailed(RuntimeError):
    """A rank failed and the run was ended; the message names the rank, its first error and its log file."""


class RemoteTraceback(Exception):
    """The traceback of an exception in the process of a rank; the cause of the same exception in its caller."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        error: message, one line.
        when: `time.monotonic` of the failure, comparable between processes of a host.
        silent: whether its process ended without reporting an exception, and not by SIGABRT.
        user_error: whether `error` is the message of a `UserError`.
        hardware: whether it is that of a `HardwareFault`, after which the state in memory is not trusted.
        of_process: whether it is that of a `ProcessFault`, which a new process may not have.
        raised: the exception, pickled; None where there is none that can be.
        traceback: of the exception, as text.
        of_another: whether it is another rank that failed, nobody knows which; `rank` has noticed.
    """

    rank: int
    error: str
    when: float
    silent: bool = False
    user_error: bool = False
    hardware: bool = False
    of_process: bool = False
    raised: bytes | None = None
    traceback: str = ""
    of_another: bool = False

    def message(self, run_dir: Path | None) -> str:
        """One line: the rank, its error and its log; of a `UserError` only its message."""
        if self.user_error:
            return self.error
        log = f" (log: {log_file(run_dir, self.rank)})" if run_dir else ""
        return f"{'a rank' if self.of_another else f'rank {self.rank}'} failed: {self.error}{log}"

    @property
    def is_final(self) -> bool:
        """Whether the same would happen again: a mistake of the user."""
        return self.user_error and not (self.hardware or self.of_process)

    def exception(self, run_dir: Path | None) -> Exception:
        """The exception for the caller of the run."""
        return (UserError if self.user_error else RankFailed)(self.message(run_dir))

    def original(self) -> Exception:
        """The exception that the rank raised, with the rank as a note and its traceback as the cause; a `RankFailed`
        where its process ended, or the exception is none that a caller handles (`SystemExit`)."""
        error = pickle.loads(self.raised) if self.raised is not None else None
        if not isinstance(error, Exception):
            error = RankFailed(self.message(None))
        error.add_note(f"Raised on rank {self.rank}." if self.traceback else f"Rank {self.rank} ended.")
        if not self.traceback:
            return error
        try:
            raise error from RemoteTraceback(self.traceback)
        except Exception as caused:
            return caused.with_traceback(None)


def from_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a rank that raised `error`."""
    now, raised, text = time.monotonic(), pickled(error), "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        kind = {"hardware": isinstance(error, HardwareFault), "of_process": isinstance(error, ProcessFault)}
        return Failure(rank, str(error), now, user_error=True, **kind, raised=raised, traceback=text)
    while error.__cause__ is not None:  # the first exception of the chain
        error = error.__cause__
    lines = [explain_allocation(error)] if explain_allocation(error) else _described(error)
    message = " ".join(line.strip() for line in lines if line.strip())
    return Failure(rank, message, now, raised=raised, traceback=text)


def _described(error: BaseException) -> list[str]:
    return traceback.format_exception_only(error)[-1].split("\n")


_LOST: Final = re.compile(r"connection|broken pipe|\bpeer|pair closure|nccl", re.IGNORECASE)
"""Words of gloo, NCCL and the store where the process at the other end has gone."""


def of_lost_peer(failure: Failure, error: BaseException) -> Failure:
    """The failure of the rank that a rank has lost the connection to, from that of the rank which noticed; where that
    is not known, of some other rank.

    Args:
        failure: of the rank that noticed.
        error: that it raised.
    """
    from threefold.comm.segments import PeerLostError  # imports torch

    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, PeerLostError) and error.rank is not None:
        return Failure(error.rank, _gone(failure.rank), failure.when, silent=True)
    if failure.user_error or not (isinstance(error, OSError | RuntimeError) and _LOST.search(failure.error)):
        return failure
    return Failure(failure.rank, _gone(failure.rank), failure.when, of_another=True)


def _gone(noticed_by: int) -> str:
    return f"its process ended without a report, or its host is out of reach of rank {noticed_by}"


def lost_rank_zero(failure: Failure) -> Failure:
    """The failure of rank 0, whose process can no longer be reached, from that of a rank which noticed.

    A rank that failed by itself after rank 0 had ended keeps its own failure.
    """
    if failure.user_error or not _LOST.search(failure.error):
        return failure
    return Failure(0, _gone(failure.rank), failure.when, silent=True)


def pickled(error: BaseException) -> bytes | None:
    """An exception for another process; None where it would not arrive, as with a constructor of several arguments."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


_HINTS: Final[dict[int, str]] = {
    signal.SIGKILL: ", as when memory runs out",
    signal.SIGBUS: ", as when a file that it reads is cut short (`threefold data verify` finds it)",
}


def from_exit_code(rank: int, code: int) -> Failure:
    """The failure of a rank whose process ended without a report: its exit status, or minus the signal's number."""
    now = time.monotonic()
    if code >= 0:
        return Failure(rank, f"its process ended with exit status {code}", now, silent=True)
    hint = _HINTS.get(-code, "")
    return Failure(rank, f"its process was killed by {signal_name(-code)}{hint}", now, silent=-code != signal.SIGABRT)


def cause(failures: Iterable[Failure]) -> Failure:
    """The failure that caused the others.

    A process that ended without a report comes first, since other ranks may report a lost connection before its end is
    noticed; but not one that aborted, as native code may abort when it loses the connection to another rank.
    """
    return min(failures, key=lambda failure: (not failure.silent, failure.when))
