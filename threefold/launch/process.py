"""Processes: forking, ending with the parent, names of signals, and how many fit into memory."""

import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from threefold.errors import UserError

PR_SET_PDEATHSIG = 1
_LEAST_MEMORY: Final = 64 << 20
"""Bytes of a rank's process without a model."""
_OWN_FILES: Final = 26
"""Files that a process of a run has open beside its connections: libraries, data, logs."""
_FEW: Final = 8
_FILES_OF_A_RANK: Final = (7, 3)
"""Connections and pipes to each other rank: of the first few, as measured, and the fewest of a further one."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends (on Linux).

    Args:
        parent: process id of the parent, read before forking, as it may have ended since.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """A block of imports: no garbage is collected in it, and no collection looks at its objects afterwards.

    The collector counts objects: while torch is imported it runs again and again, a fifth of the time of the imports,
    and finds nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def shared_objects() -> Iterator[None]:
    """A block in which this process forks: no collection looks at what it has now, here in the block and in the forks.

    A collection writes to all objects that it looks at. The first one in a fork would copy every page of what its
    parent has imported: 17,000 pages and 0.2 s for each rank, in its first step.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def signal_name(number: int) -> str:
    """The name of a signal, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def require_room(ranks: int) -> None:
    """Check that the memory of this machine and the open files of a process suffice for so many processes.

    Raises:
        UserError: they do not, even without a model.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    least = _OWN_FILES + _FILES_OF_A_RANK[0] * min(ranks, _FEW) + _FILES_OF_A_RANK[1] * max(ranks - _FEW, 0)
    if files != resource.RLIM_INFINITY and files < least:
        raise UserError(
            f"A process may have {files:,} files open here (ulimit -n), too few for {ranks:,} "
            f"rank{'' if ranks == 1 else 's'} that are connected to each other; set it to {2 * least:,} or more with "
            f"`ulimit -n {2 * least}`."
        )
    most = max(1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _LEAST_MEMORY)
    if ranks > most:
        raise UserError(
            f"The layout has {ranks} ranks, more than the memory of this machine has room for; use at most {most} "
            "here, or start them on several machines with torchrun or srun."
        )


def has_group() -> UserError:
    """The error that this process is a rank already."""
    return UserError(
        "torch.distributed is initialised in this process, so it cannot start ranks of its own; call init_mesh in "
        "the function that runs on each rank."
    )


def prepare_fork() -> bool:
    """Make this process one whose forks can run torch's operations.

    Returns whether they may run them in parallel: False where threads of this process could not be ended, and forks
    compute with one thread each.

    Raises:
        UserError: a process group or CUDA is initialised, which forks cannot use.
    """
    import torch
    import torch.distributed as dist

    from threefold.torch_private.threads import end_openmp_threads

    if dist.is_initialized():
        raise has_group()
    if torch.cuda.is_initialized():
        raise UserError(
            "CUDA is initialised in this process, so its forks could not use it; start the ranks before anything uses "
            "a GPU (in a notebook, restart the kernel), or with start_method='spawn'."
        )
    return end_openmp_threads()
