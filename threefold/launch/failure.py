"""Describe failures of ranks, and find the first cause among several."""

import pickle
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Final

from threefold.errors import HardwareFault, PeerLostError, ProcessFault, UserError
from threefold.files import hide_secrets
from threefold.host import memory, task_limits
from threefold.launch.output import failure_file, log_file
from threefold.launch.process import no_more_tasks, signal_name


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
    lines = (explain_limit(error) or traceback.format_exception_only(error)[-1]).split("\n")
    message = hide_secrets(" ".join(line.strip() for line in lines if line.strip()))
    return Failure(rank, message, now, raised=raised, traceback=text)


def formatted(error: BaseException) -> str:
    """Return the traceback of an exception, without the secrets that its messages quote."""
    return hide_secrets("".join(traceback.format_exception(error)))


def explain_limit(error: BaseException) -> str:
    """Return a clause on an error by a limit of this host on memory, processes or threads; empty for another error."""
    if explained := _explain_allocation(error):
        return explained
    if not _is_task_limit(error):
        return ""
    # A thread needs address space for its stack.
    return small_address_space() if _space() is not None and not task_limits() else no_more_tasks()


def _is_task_limit(error: BaseException) -> bool:
    """Return whether an error came from starting a process or a thread beyond a limit."""
    if isinstance(error, RuntimeError):  # of threading and of native code
        return re.search(r"can't start new thread|^Resource temporarily unavailable", str(error)) is not None
    if not isinstance(error, BlockingIOError):  # which reading a pipe may raise too
        return False
    frames = [frame.f_code.co_names for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any("fork" in name for name in (frames[-1] if frames else ()))


LEAST_SPACE: Final = 1.3e9
"""Address space in bytes that a rank of the smallest model needs on two cores, measured; more cores need more."""


def _space() -> int | None:
    """Return the limit on the address space of this process in bytes; None without one."""
    found = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if found == resource.RLIM_INFINITY else found


def small_address_space(what: str = "none is left") -> str:
    """Return a clause on the limit on this process's address space."""
    return (
        f"the address space of a process, which RLIMIT_AS (ulimit -v) limits to {(_space() or 0) / 1e9:,.2f} GB here, "
        f"is not enough: {what}; a rank of a small model takes {LEAST_SPACE / 1e9:g} to 2 GB, so raise the limit, as "
        "with `ulimit -v unlimited`"
    )


def refuse_torch_without_space() -> None:
    """Make the import of torch raise a `UserError` where the address space is too small for it.

    Otherwise the C library may end the process in the middle of it, without an error that could be explained.
    """
    if (space := _space()) is not None and space < LEAST_SPACE:
        sys.meta_path.insert(0, _NoSpaceForTorch())


class _NoSpaceForTorch(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "torch":
            told = small_address_space("torch cannot be used in it")
            raise UserError(f"{told[0].upper()}{told[1:]}.")


_NO_MEMORY: Final = re.compile(r"(?i)DefaultCPUAllocator|can't allocate memory|out of memory|Unable to allocate")
_TRIED: Final = re.compile(r"(?:tried to allocate|allocate) ([0-9.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)


def _explain_allocation(error: BaseException) -> str:
    """Return an explanation of a failed allocation; empty if the error is of another kind."""
    text, what, where = str(error), "none is left", "the GPU's memory"
    # Libraries are mapped into memory on import, where CPython and torch raise all sorts of errors.
    limited = _space() is not None and "CUDA" not in text
    mapping = limited and (isinstance(error, SystemError) or "failed to map segment" in text)
    if not (mapping or isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(text))):
        return ""
    if tried := _TRIED.search(text):
        units = ("bytes", "kib", "mib", "gib", "tib", "pib", "eib")
        size = float(tried[1]) * 1024 ** units.index(tried[2].lower()) / 1e9
        what = f"{size:,.1f} GB could not be allocated"
    if limited:
        return small_address_space(what)
    if "CUDA" not in text:
        where = f"the memory of this machine, {memory() / 1e9:,.1f} GB for all its processes,"
    return (
        f"{where} is not enough: {what}; use a smaller train.micro_batch_size, train.recompute, parallel.zero, or "
        "more ranks of tp or pp on more machines"
    )


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
    hints = {
        -signal.SIGKILL: ", as when memory runs out",
        -signal.SIGBUS: ", as when a file that it reads is cut short (`threefold data verify` finds it)",
    }
    if _space() is not None:  # where native code cannot allocate memory for a thread, it aborts
        hints[-signal.SIGABRT] = f", as where {small_address_space()}"
    hint = hints.get(code, "")
    return Failure(rank, f"its process was killed by {signal_name(-code)}{hint}", now, silent=-code != signal.SIGABRT)


def cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others.

    A process that ended without a report comes first, as other ranks may report a lost connection before its end is
    noticed. One that aborted does not: native code may abort when it loses the connection to another rank.
    """
    return min(failures, key=lambda failure: (not failure.silent, failure.when))
