"""Private parts of torch with which one process runs as a rank of a large run, on tensors without memory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

OperationMode = TorchDispatchMode
"""Base class of modes that see every operation in a block. Why: its documentation is in a note on extending torch, but
its module is private. A public name would replace it."""

tree_leaves = _pytree.tree_leaves
"""Function that lists values of nested arguments. Why: operations take any nesting; a public one would replace it."""

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of the operations as which modes see collectives. Why: only one rank runs a check against one process, in
which a collective of the user's would wait for the others. A documented way to refuse them would replace it."""


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which operations compute shapes and allocate no memory; tensors with memory may take part.

    Why: `FakeTensorMode` is documented, but only a private module has it. A public name would replace it.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


TOP_K = torch.ops.aten.topk.default
SPLIT = torch.ops.aten.split.Tensor
RECEIVE = torch.ops.c10d.recv_.default
ALL_GATHER = torch.ops.c10d._allgather_base_.default
"""Operations as modes see them: `torch.topk`, `torch.split`, a receive, and a gather of equal tensors. Why: the values
that other ranks would send have to be made up. A fake process group that does so would replace it."""

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise
"""Operations for which `torch.utils.flop_counter` has no formula. Why: their FLOPs are counted. Formulas in torch would
replace it."""

with_memory = unset_fake_temporarily
"""Context manager that leaves this mode within a block. Why, and what would replace it: as for `fake_tensors`."""


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Set up a default process group in which this process is one rank of many, and collectives send nothing.

    The block leaves no process group behind; a process that has one already gets a RuntimeError.

    Why: a module of torch's tests registers the backend `fake`. A public module would replace it.
    """
    if dist.is_initialized():
        raise RuntimeError("a fake process group cannot be made in a process that has another")
    hook = sys.excepthook  # torch's names the rank in tracebacks, and would stay
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def storage_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` with each storage whose size changes in the block, after the change.

    Why: `fully_shard` frees gathered weights by resizing their storage, which is not an operation that a dispatch mode
    sees; torch's own `MemTracker` replaces the method too. An allocator event for tensors without memory would replace
    it.
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
