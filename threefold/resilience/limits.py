"""Limits of this host on memory, processes, threads and open files: refusals before a start, and explained errors."""

import os
import re
import resource
import signal
import sys
import traceback
from contextlib import suppress
from importlib.abc import MetaPathFinder
from typing import Final

from threefold.errors import UserError
from threefold.files import counted
from threefold.host import group_limits, memory

_LEAST_MEMORY: Final = 64 << 20  # bytes of a rank's process without a model
# Processes and threads of a rank: those without which a rank alone, and each of several, cannot train (measured: with
# fewer, native code that cannot start a thread waits without end, or aborts), and those of a usual run.
_LEAST_ALONE, _LEAST_TASKS, _USUAL_TASKS = 8, 11, 16


def require_room(ranks: int) -> None:
    """Raise `UserError` unless there is room for `ranks` processes without a model.

    They need memory, open files, and processes and threads of this user.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # 26 for libraries, data and logs; connections and pipes to each other rank, measured for the first eight, a lower
    # bound for each further one.
    least = 26 + 7 * min(ranks, 8) + 3 * max(ranks - 8, 0)
    if files != resource.RLIM_INFINITY and files < least:
        raise UserError(
            f"A process may have {files:,} files open here (ulimit -n), too few for {counted(ranks, 'rank')} that are "
            f"connected to each other; set it to {2 * least:,} or more with `ulimit -n {2 * least}`."
        )
    most = max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _LEAST_MEMORY)
    if ranks > most:
        raise UserError(
            f"The layout has {ranks} ranks, more than the memory of this machine has room for; use at most {most} "
            "here, or start them on several machines with torchrun or srun."
        )
    limit = min(_task_limits().values(), default=None)
    # Counting takes milliseconds, so a limit that is far away is left to the error of who reaches it.
    least = _LEAST_TASKS * ranks if ranks > 1 else _LEAST_ALONE
    if limit is not None and limit < 1000 + 10 * least and limit < (have := _tasks_of_user()) + least:
        raise UserError(f"N{_no_more_tasks(ranks, have)[1:]}.")


def _no_more_tasks(ranks: int = 1, have: int = 0) -> str:
    """Return a clause on a process or thread that cannot be started: the limits, and what `ranks` ranks need."""
    limits = " and ".join(f"{name} allows {limit:,}" for name, limit in _task_limits().items())
    need, there = _USUAL_TASKS * ranks, f" besides the {have:,} that this user has" if have else ""
    return (
        f"no more processes or threads can be started here ({limits or 'the system gives no limit'}), and "
        f"{counted(ranks, 'rank')} of a run {'need' if ranks > 1 else 'needs'} about {need:,}{there}; raise the limit, "
        f"as with `ulimit -u {max(4096, 2 * (need + have))}`, or use fewer ranks"
    )


def _tasks_of_user() -> int:
    """Return the number of processes and threads of this user, as far as /proc shows them."""
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{pid}/task"))
    return found


def _task_limits() -> dict[str, int]:
    """Return the numbers of processes and threads that this user and this control group may have, by the limits' names.

    Without those that do not apply: the kernel exempts root from RLIMIT_NPROC.
    """
    limits = {}
    if sys.platform != "win32" and os.getuid():
        limits["RLIMIT_NPROC (ulimit -u)"] = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if limits["RLIMIT_NPROC (ulimit -u)"] == resource.RLIM_INFINITY:
            limits.clear()
    groups = group_limits("pids", lambda group: int((group / "pids.max").read_text()))
    return limits | ({"pids.max of the control group": int(min(groups))} if groups else {})


def explain_limit(error: BaseException) -> str:
    """Return a clause on an error by a limit of this host on memory, processes or threads; empty for another error."""
    if explained := _explain_allocation(error):
        return explained
    if not _is_task_limit(error):
        return ""
    # A thread needs address space for its stack.
    return _small_address_space() if _space() is not None and not _task_limits() else _no_more_tasks()


def _is_task_limit(error: BaseException) -> bool:
    """Return whether an error came from starting a process or a thread beyond a limit."""
    if isinstance(error, RuntimeError):  # of threading and of native code
        return re.search(r"can't start new thread|^Resource temporarily unavailable", str(error)) is not None
    if not isinstance(error, BlockingIOError):  # which reading a pipe may raise too
        return False
    frames = [frame.f_code.co_names for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any("fork" in name for name in (frames[-1] if frames else ()))


_LEAST_SPACE: Final = 1.3e9
"""Address space in bytes that a rank of the smallest model needs on two cores, measured; more cores need more."""


def _space() -> int | None:
    """Return the limit on the address space of this process in bytes; None without one."""
    found = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if found == resource.RLIM_INFINITY else found


def _small_address_space(what: str = "none is left") -> str:
    """Return a clause on the limit on this process's address space."""
    return (
        f"the address space of a process, which RLIMIT_AS (ulimit -v) limits to {(_space() or 0) / 1e9:,.2f} GB here, "
        f"is not enough: {what}; a rank of a small model takes {_LEAST_SPACE / 1e9:g} to 2 GB, so raise the limit, as "
        "with `ulimit -v unlimited`"
    )


def refuse_torch_without_space() -> None:
    """Make the import of torch raise a `UserError` where the address space is too small for it.

    Otherwise the C library may end the process in the middle of it, without an error that could be explained.
    """
    if (space := _space()) is not None and space < _LEAST_SPACE:
        sys.meta_path.insert(0, _NoSpaceForTorch())


class _NoSpaceForTorch(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "torch":
            told = _small_address_space("torch cannot be used in it")
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
        return _small_address_space(what)
    if "CUDA" not in text:
        where = f"the memory of this machine, {memory() / 1e9:,.1f} GB for all its processes,"
    return (
        f"{where} is not enough: {what}; use a smaller train.micro_batch_size, train.recompute, parallel.zero, or "
        "more ranks of tp or pp on more machines"
    )


def explain_exit(code: int) -> str:
    """Return a clause on a process that ended by a signal, of which `code` is the negative number; often empty."""
    hints = {
        -signal.SIGKILL: ", as when memory runs out",
        -signal.SIGBUS: ", as when a file that it reads is cut short (`threefold data verify` finds it)",
    }
    if _space() is not None:  # where native code cannot allocate memory for a thread, it aborts
        hints[-signal.SIGABRT] = f", as where {_small_address_space()}"
    return hints.get(code, "")
