"""Private parts of torch with which several ranks are threads of one process, and which say what a collective is of."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld, WorldData

THREADS: Final = "threefold_threads"
"""Name of the backend whose groups `thread_groups` makes."""
MakeGroup = Callable[[str, tuple[int, ...], int], dist.ProcessGroup]
"""Makes a rank's process group: (name, ranks, index of this rank in them) → group."""


class _Worlds(ThreadLocalWorld):
    """The process groups of each thread, in place of those of the process."""

    def __init__(self, make_group: MakeGroup) -> None:
        self.make_group, self._local = make_group, threading.local()

    def _get_world(self) -> WorldData:
        if not hasattr(self._local, "world"):
            self._local.world = WorldData(
                None,  # type: ignore[arg-type]
                {},
                {},
                {},
                {},
                0,
                {},
                {},
                {},
                [],
            )
        found: WorldData = self._local.world
        return found


def _worlds_here() -> _Worlds:
    found = dist.distributed_c10d._world
    assert isinstance(found, _Worlds)  # the backend is used within `thread_groups` only
    return found


def _make(options: Any, _: Any) -> dist.ProcessGroup:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return _worlds_here().make_group(str(options.group_id), ranks, options.group_rank)


@contextmanager
def thread_groups(make_group: MakeGroup) -> Iterator[None]:
    """Let each thread be a rank of its own within the block, whose process groups `make_group` makes.

    A process that has a process group already gets a RuntimeError.

    Why: the tables of process groups belong to the process; torch's tests of several ranks in threads replace them by
    tables of the thread. Process groups that are objects without such tables would replace it.
    """
    before = dist.distributed_c10d._world
    if isinstance(before, _Worlds) or dist.is_initialized():
        raise RuntimeError("ranks cannot be threads of a process that has a process group")
    if THREADS not in dist.Backend.backend_list:
        dist.Backend.register_backend(THREADS, _make, extended_api=True, devices=["cpu"])
    hook = sys.excepthook  # torch's names the rank in tracebacks, and would stay
    dist.distributed_c10d._world = _Worlds(make_group)  # type: ignore[assignment]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        dist.distributed_c10d._world = before
        sys.excepthook = hook


@contextmanager
def thread_rank(rank: int, size: int, store: dist.Store) -> Iterator[None]:
    """Let this thread be a rank within the block, inside `thread_groups`.

    Why, and what would replace it: as for `thread_groups`.
    """
    dist.init_process_group(THREADS, rank=rank, world_size=size, store=store)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        dist.destroy_process_group()


def notes_of(node: torch.autograd.graph.Node) -> dict[str, Any]:
    """Return the dictionary that a node of the autograd graph keeps for its users.

    Why: torch declares it a method, and it is an attribute. A right declaration would replace it.
    """
    notes: Any = node.metadata
    kept: dict[str, Any] = notes
    return kept


def notes_of_current_node() -> dict[str, Any]:
    """Return the notes of the node whose backward pass this thread is in; empty outside one.

    Why: a collective of the backward pass is called by a function that does not know its module. A public name of the
    current node would replace it.
    """
    node = torch._C._current_autograd_node()
    return {} if node is None else notes_of(node)


def sharded_names(frame: FrameType | None) -> Sequence[str]:
    """Return the names of the parameters that FSDP gathers, or whose gradients it sums, in the frames around `frame`.

    Names are those in FSDP's root module. Empty outside of FSDP's collectives.

    Why: FSDP gathers the weights of a module ahead of its pass, in a hook of another module, and tells neither its
    custom all-gather nor its reduce-scatter which ones. Arguments with the module would replace it.
    """
    while frame is not None:
        group = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("_fsdp_param_group.py") else None
        if isinstance(group, FSDPParamGroup):
            return [name for each in group.fsdp_params if (name := each._param_fqn) is not None]
        frame = frame.f_back
    return ()
