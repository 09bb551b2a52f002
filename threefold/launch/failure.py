"""Describe failures of ranks, and find the first cause among several."""

import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from threefold.doors import call_hook, hook
from threefold.errors import HardwareFault, PeerLostError, ProcessFault, UserError
from threefold.files import hide_secrets
from threefold.launch.output import failure_file, log_file
from threefold.launch.process import signal_name

_EXPLAIN_LIMIT: Final[Callable[[BaseException], str]] = hook("explain_limit") or (lambda error: "")
"""Imported with this module, which may not be possible once memory or open files are at their limit."""


class RankFailed(RuntimeError):
    """A rank failed and the run was ended; the message names the rank, its first error and its log file."""


class RemoteTraceback(Exception):
    """Traceback of an exception in a rank's process, set as the cause of the exception re-raised in the caller."""


@dataclass(frozen=True)
class Failure:
    """Description of how one rank failed.

    Attributes:
        error: message, one line.
        when: `time.monotonic` of the failure, comparable between processes of a host.
        silent: whether the process ended without reporting an exception, and not by SIGABRT.
        user_error: whether `error` is the message of a `UserError`.
        hardware: whether it was a `HardwareFault`, after which the state in memory is not trusted.
        of_process: whether it was a `ProcessFault`, which a new process may not have.
        raised: pickled exception, if there is one that can be pickled.
        of_another: whether an unknown other rank failed; `rank` noticed it.
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
        """Return one line with the rank, its error and its log; for a `UserError` only its message."""
        if self.user_error:
            return self.error
        log = f" (log: {log_file(run_dir, self.rank)})" if run_dir else ""
        return f"{'a rank' if self.of_another else f'rank {self.rank}'} failed: {self.error}{log}"

    def exception(self, run_dir: Path | None) -> Exception:
        """Return the exception for the caller of the run."""
        return (UserError if self.user_error else RankFailed)(self.message(run_dir))

    def original(self) -> Exception:
        """Return the exception that the rank raised, with the rank as a note and the rank's traceback as its cause.

        Return a `RankFailed` if the process ended, or if callers do not handle the exception (`SystemExit`).
        """
        error = pickle.loads(self.raised) if self.raised is not None else None
        if not isinstance(error, Exception):
            error = RankFailed(self.message(None))
        error.add_note(f"Raised on rank {self.rank}." if self.traceback else f"Rank {self.rank} ended.")
        if not self.traceback:
            return error
        try:
            raise error from RemoteTraceback(f"\n{self.traceback}")
        except Exception as caused:
            return caused.with_traceback(None)


def from_exception(rank: int, error: BaseException) -> Failure:
    now, raised, text = time.monotonic(), pickled(error), formatted(error)
    if isinstance(error, UserError):
        kind = {"hardware": isinstance(error, HardwareFault), "of_process": isinstance(error, ProcessFault)}
        return Failure(rank, str(error), now, user_error=True, **kind, raised=raised, traceback=text)
    error = _first_of_chain(error)
    lines = (_EXPLAIN_LIMIT(error) or traceback.format_exception_only(error)[-1]).split("\n")
    message = hide_secrets(" ".join(line.strip() for line in lines if line.strip()))
    return Failure(rank, message, now, raised=raised, traceback=text)


def formatted(error: BaseException) -> str:
    """Return the traceback of an exception, without the secrets that its messages quote."""
    return hide_secrets("".join(traceback.format_exception(error)))


def _first_of_chain(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


_LOST: Final = re.compile(r"connection|broken pipe|\bpeer|pair closure|nccl", re.IGNORECASE)
"""Words in errors of gloo, NCCL and the store when the process at the other end has gone."""


def of_lost_peer(failure: Failure, error: BaseException) -> Failure:
    """Return the failure of the rank whose connection was lost; if that rank is unknown, one marked `of_another`.

    Errors other than a lost connection return `failure`, that of the rank which raised `error`.
    """
    error = _first_of_chain(error)
    if isinstance(error, PeerLostError) and error.rank is not None:
        return Failure(error.rank, _gone(failure.rank), failure.when, silent=True)
    if failure.user_error or not (isinstance(error, OSError | RuntimeError) and _LOST.search(failure.error)):
        return failure
    return Failure(failure.rank, _gone(failure.rank), failure.when, of_another=True)


def _gone(noticed_by: int) -> str:
    return f"its process ended without a report, or its host is out of reach of rank {noticed_by}"


def lost_rank_zero(failure: Failure) -> Failure:
    """Return the failure of unreachable rank 0 from that of a rank that noticed; return any other failure unchanged."""
    if failure.user_error or not _LOST.search(failure.error):
        return failure
    return Failure(0, _gone(failure.rank), failure.when, silent=True)


def is_first_to_report(store: Any) -> bool:
    """Return whether no rank of the launcher's `store` has reported a failure before this one."""
    return int(store.add("failures", 1)) == 1


def claims_report(run_dir: Path, failure: Failure) -> bool:
    """Write the failure to a file that only one rank can create; return whether this rank reports."""
    try:
        with failure_file(run_dir).open("x", encoding="utf-8") as file:
            file.write(f"{failure.message(run_dir)}\n")
    except OSError as error:  # such as a full disk: better to report twice than not at all
        return not isinstance(error, FileExistsError)
    return True


def pickled(error: BaseException) -> bytes | None:
    """Pickle an exception for another process; None if unpickling would fail, as with several constructor arguments."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def from_exit_code(rank: int, code: int) -> Failure:
    """Return the failure of a rank that ended without a report; `code` is its exit status or minus the signal."""
    now = time.monotonic()
    if code >= 0:
        return Failure(rank, f"its process ended with exit status {code}", now, silent=True)
    hint = call_hook("explain_exit", code) or ""
    return Failure(rank, f"its process was killed by {signal_name(-code)}{hint}", now, silent=-code != signal.SIGABRT)


def cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others.

    A process that ended without a report comes first, as other ranks may report a lost connection before its end is
    noticed. One that aborted does not: native code may abort when it loses the connection to another rank.
    """
    return min(failures, key=lambda failure: (not failure.silent, failure.when))
