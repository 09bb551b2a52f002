"""Horovod's ranks: how they meet, their numbers, and what they communicate through."""

import os
from typing import Any, Final

import torch.distributed as dist

from threefold.api.launch import join_ranks
from threefold.comm.axis import Axis, EventRecorder
from threefold.errors import UserError
from threefold.launch.environment import find_launched_rank, local_place

_OTHER_LAUNCHERS: Final = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables of launchers that say how many ranks they started, but no place where the ranks meet."""


def init(*unsupported: Any, **options: Any) -> None:
    """Initialise `torch.distributed` if it is not.

    Args:
        unsupported: Horovod's `comm`, a part of the ranks; refused.
        options: Horovod's further arguments, `comm` and `process_sets`; refused unless None.

    Raises:
        UserError: an argument is given, or the ranks were started by a launcher that names no place to meet.

    Example:
        ```python
        from threefold.compat import horovod as hvd

        hvd.init()
        print(hvd.rank(), hvd.size())
        ```
    """
    if unsupported or any(value is not None for value in options.values()):
        raise UserError("hvd.init was given a part of the ranks, but it takes all of them; call it without arguments.")
    if not dist.is_initialized() and find_launched_rank() is None:
        for name in _OTHER_LAUNCHERS:
            if os.environ.get(name, "1") != "1":
                raise UserError(
                    f"{name} is {os.environ[name]}, so horovodrun or mpirun started this process, whose ranks cannot "
                    f"meet; start it with `torchrun --nproc-per-node {os.environ[name]} SCRIPT.py`."
                )
    join_ranks()


def shutdown() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    """Return whether there is a process group."""
    return dist.is_initialized()


def rank() -> int:
    """Return the number of this rank."""
    return world().index


def size() -> int:
    """Return the number of ranks."""
    return world().size


def local_rank() -> int:
    """Return the number of this rank among those of its host, which is the index of its GPU."""
    return _local_place()[0]


def local_size() -> int:
    """Return the number of ranks of this host."""
    return _local_place()[1]


def nccl_built() -> bool:
    """Return whether torch has NCCL."""
    return dist.is_nccl_available()


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def mpi_built() -> bool:
    """Return False: ranks do not communicate through MPI."""
    return False


def join(device: int = -1) -> int:
    """Raise a `UserError`: ranks without samples cannot leave the others.

    Args:
        device: Horovod's argument; ignored.
    """
    raise UserError(
        "hvd.join has no counterpart, as all ranks make the same number of steps; use torch's DistributedSampler, "
        "which gives them equally many samples."
    )


def world(root_rank: int = 0, process_set: None = None) -> Axis:
    """Return the axis of all ranks of the default process group; raise a `UserError` if it lacks the root."""
    if not dist.is_initialized():
        raise UserError("torch.distributed is not initialised, so there are no ranks; call hvd.init() first.")
    if process_set is not None:
        raise UserError("process_set is given but collectives are over all ranks; leave it out.")
    ranks = tuple(range(dist.get_world_size()))
    if root_rank not in ranks:
        raise UserError(f"root_rank is {root_rank!r} but the world has the ranks 0 to {ranks[-1]}; use 0.")
    return Axis("world", ranks, dist.get_rank(), dist.group.WORLD, EventRecorder())


def _local_place() -> tuple[int, int]:
    axis, launched = world(), find_launched_rank()
    if launched is not None:
        return launched.local_rank, launched.local_world_size
    return local_place(axis.index, axis.size)
