"""Private parts of torch for process groups in Python, each with the reason why, and with what would replace it."""

from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist


def process_group_timeout(group: dist.ProcessGroup) -> float:
    """Return the timeout in seconds of a CPU group's collectives.

    Why: collectives in shared memory use the same timeout. A public accessor would replace it.
    """
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def with_gloo(
    group: dist.ProcessGroup, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Give a `PythonGroup` gloo for the CPU, and return a group of torch's own class with the same gloo.

    Torch reads a group's timeouts, and the device of objects that it sends, from such a backend.

    Why: a process group in Python has no backends, and torch's own get theirs by `_register_backend`. Torch's own class
    has gloo's collectives under the names that torch calls. A documented way to write a backend in Python would replace
    it.
    """
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    of_torch = dist.ProcessGroup(store, rank, size)
    of_torch._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for each in (group, of_torch):
        each._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return of_torch


_SERVED: Final = (
    *("allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "allreduce_coalesced", "alltoall"),
    *("all_to_all_single", "barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "scatter", "send"),
)


def stand_in(group: dist.ProcessGroup, gloo: dist.ProcessGroup) -> None:
    """Give a `PythonGroup` the ranks and the backend of a gloo group, which provides what the class does not define.

    Why, and what would replace it: as for `with_gloo`. Methods are gloo's own. Those that a class in Python inherits
    hold the interpreter's lock while they wait for a thread of gloo, which may need that lock to free a tensor.
    """
    for name in _SERVED:
        if name not in vars(type(group)):
            setattr(group, name, getattr(gloo, name))
    backend = gloo._get_backend(torch.device("cpu"))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(gloo.group_name)
    known = dist.distributed_c10d._world
    known.pg_group_ranks[group], known.pg_map[group] = known.pg_group_ranks[gloo], known.pg_map[gloo]
    known.pg_backend_config[group] = known.pg_backend_config[gloo]  # torch's profiler reads it


def withdraw(group: dist.ProcessGroup) -> None:
    """Undo what `stand_in` registered with torch for a group, so that torch no longer keeps the group alive.

    Why: torch's tables keep a group, and so the memory that its ranks share, until all groups are destroyed.
    `destroy_process_group` of one group would also shut down its gloo, which others use.
    """
    known = dist.distributed_c10d._world
    known.pg_map.pop(group, None)
    known.pg_group_ranks.pop(group, None)
    known.pg_backend_config.pop(group, None)
