"""Private parts of torch with which one process runs as a rank of a large run, on tensors without memory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "ALL_GATHER",
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "ONEDNN_LINEAR",
    "RECEIVE",
    "SPLIT",
    "TOP_K",
    "FakeTensor",
    "OperationMode",
    "fake_process_group",
    "fake_tensors",
    "leaves",
    "storage_resizes",
    "with_memory",
]

OperationMode = TorchDispatchMode
"""Base class of what sees every operation in a block. Why: its documentation is in a note on extending torch, its
module private. A public name would replace it."""

leaves = tree_leaves
"""The leaves of nested arguments. Why: arguments of operations are nested in any way. A public module would replace
it."""


def fake_tensors() -> FakeTensorMode:
    """A mode in which operations compute shapes and allocate no memory; tensors that have memory may take part.

    Why: `FakeTensorMode` is documented for `torch.compile` and tracing tools, and importable from a private module
    only. A public name would replace it.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


TOP_K = torch.ops.aten.topk.default
SPLIT = torch.ops.aten.split.Tensor
RECEIVE = torch.ops.c10d.recv_.default
ALL_GATHER = torch.ops.c10d._allgather_base_.default
"""Operations as modes see them: those of `torch.topk`, `torch.split`, receiving a tensor and gathering equal ones. Why:
values have to be made up for what other ranks would send. A fake process group that does it would replace it."""

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise
"""Operations that `torch.utils.flop_counter` has no formula for. Why: they are counted. Formulas of torch's own would
replace it."""

with_memory = unset_fake_temporarily
"""Leaves that mode within a block. Why, and what would replace it: as `fake_tensors`."""


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """The default process group, of one process that takes itself for a rank of many: its collectives send nothing.

    Leaves nothing behind.

    Why: the backend `fake` is registered by a module of torch's tests. A public module would replace it.

    Raises:
        RuntimeError: this process has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("a fake process group cannot be made in a process that has another")
    hook = sys.excepthook  # torch's names the rank in tracebacks, and stays
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def storage_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` with each storage whose size is changed in the block, after the change.

    Why: `fully_shard` frees gathered weights by a resize of their storage, which is no operation that a dispatch mode
    sees; torch's own `MemTracker` replaces the method as well. An event of the allocator for tensors without memory
    would replace it.
    """
    before = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        done = before(storage, size)
        resized(storage)
        return done

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]
