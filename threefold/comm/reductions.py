"""Sums over the ranks of one axis of the mesh, also differentiable ones for layers, and the record of collectives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from threefold.comm import tree
from threefold.comm.heartbeat import Heartbeat, wait_code
from threefold.comm.shared_memory import SharedMemoryGroup
from threefold.torch_private.distributed import all_reduce_options
from threefold.torch_private.runtime import Handle, operator
from threefold.torch_private.tensors import foreach_copy_

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Group = TypeVar("_Group", bound="RankGroup")
_Method = Callable[Concatenate[_Group, _P], _T]


def waits(operation: str) -> Callable[[_Method[_Group, _P, _T]], _Method[_Group, _P, _T]]:
    """Note in the heartbeat that this rank waits for the others of the axis while the decorated method runs."""
    first_code = wait_code(operation, 0)

    def decorate(method: _Method[_Group, _P, _T]) -> _Method[_Group, _P, _T]:
        @wraps(method)
        def waiting(self: _Group, *args: _P.args, **options: _P.kwargs) -> _T:
            if len(self.ranks) == 1:
                return method(self, *args, **options)
            self.heartbeat.wait(first_code + self.number)
            try:
                return method(self, *args, **options)
            finally:
                self.heartbeat.resume()

        return waiting

    return decorate


_SUM, _MAX = all_reduce_options(dist.ReduceOp.SUM), all_reduce_options(dist.ReduceOp.MAX)


@dataclass(frozen=True)
class Event:
    """One recorded collective.

    Attributes:
        axis: the axis's name.
        operation: `all_reduce`, `all_reduce_max`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast` or `send`.
        nbytes: bytes of the unsharded tensor: the input of an all-reduce or a reduce-scatter, the output of an
            all-gather, the rows that this rank sends in an all-to-all.
    """

    axis: str
    operation: str
    nbytes: int


@dataclass
class EventRecorder:
    """Record of this rank's collectives, kept while a `recording` block is open."""

    _logs: list[list[Event]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Collect the collectives of a block in the list that is yielded."""
        log: list[Event] = []
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs.remove(log)

    def add(self, axis: str, operation: str, tensor: Tensor, parts: int = 1) -> None:
        """Record an operation on a tensor that consists of `parts` tensors of the size of `tensor`."""
        for log in self._logs:
            log.append(Event(axis, operation, parts * tensor.nbytes))


@dataclass(frozen=True)
class RankGroup:
    """Ranks that differ from this one along one axis only, with their sums; see `Axis`, which has all collectives.

    With `in_tree`, sums of floating-point numbers are computed in a balanced binary tree over the ranks, with every
    node rounded to the tensor's dtype, on every backend (exact runs).
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    recorder: EventRecorder
    device_mesh: DeviceMesh | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    number: int = 0
    in_tree: bool = False
    handle: Handle = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", Handle(self))  # compiled code cannot create it

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def shares_memory(self) -> bool:
        """Whether collectives of CPU tensors go through shared memory."""
        return isinstance(self.group, SharedMemoryGroup)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the axis."""
        return self.index == 0

    @waits("all_reduce")
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the axis, bitwise equal on every rank; `tensor` is unchanged."""
        if isinstance(self.group, SharedMemoryGroup):
            self.recorder.add(self.name, "all_reduce", tensor)
            return self.group.sum_of(tensor)
        return self.all_reduce_(tensor.clone(memory_format=torch.contiguous_format))

    @waits("all_reduce")
    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the axis, in place; the result is bitwise equal on every rank."""
        if self.size == 1:
            return tensor
        if self._exchanges(tensor):
            return self._all_reduce_in_tree_(tensor)
        self.recorder.add(self.name, "all_reduce", tensor)
        self._reduce_contiguous(tensor, _SUM)
        return tensor

    def all_reduce_values(self, tensor: Tensor) -> list[Any]:
        """Sum a one-dimensional `tensor` over the axis, in place, and return its elements."""
        summed = self.all_reduce_(tensor)
        # On a GPU, reading the values is what waits for the other ranks.
        with nullcontext() if tensor.is_cpu else self.waiting("all_reduce"):
            return list(summed.tolist())

    def all_reduce_together_(self, tensors: Sequence[Tensor], in_order: bool = False) -> None:
        """Sum several tensors over the axis, in place, in one all-reduce.

        Args:
            tensors: tensors of one dtype, in the same order on all ranks.
            in_order: whether an element's sum must not depend on its position among the tensors, nor on their sizes.
        """
        if self.size == 1 or not tensors:
            return
        if len(tensors) == 1:
            self.all_reduce_(tensors[0])
            return
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        # Two summands have the same sum in either order, and shared memory adds in the order of the ranks.
        in_order &= self.size > 2 and not self.shares_memory and joined.device.type == "cpu"
        total = self._all_reduce_in_tree_(joined) if in_order else self.all_reduce_(joined)
        parts = total.split([tensor.numel() for tensor in tensors])
        foreach_copy_(list(tensors), [part.view_as(to) for part, to in zip(parts, tensors, strict=True)])

    @waits("all_reduce_max")
    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        """Take the maximum of `tensor` over the axis, in place."""
        if self.size == 1:
            return tensor
        self.recorder.add(self.name, "all_reduce_max", tensor)
        self._reduce_contiguous(tensor, _MAX)
        return tensor

    def start_all_reduce_(self, tensor: Tensor) -> dist.Work | None:
        """Start an all-reduce of a contiguous `tensor`, in place; return the work to wait for (None if done).

        Over shared memory (CPU ranks of one host), the all-reduce runs when it is waited for, and overlaps nothing.
        """
        if self.size == 1:
            return None
        self.recorder.add(self.name, "all_reduce", tensor)
        if self._exchanges(tensor):
            return tree.start_sum_(tensor.detach().view(-1), self._group, rounding=True)
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    @waits("all_reduce")
    def finish_all_reduce(self, work: dist.Work) -> None:
        """Wait for an all-reduce that `start_all_reduce_` started."""
        work.wait()

    def waiting(self, operation: str) -> AbstractContextManager[None]:
        """Note in the heartbeat that a block waits for the others, as it uses the process group directly.

        Args:
            operation: one of `threefold.comm.rank_state.OPERATIONS`.
        """
        return self.heartbeat.waiting(wait_code(operation, self.number))

    @property
    def _group(self) -> Any:
        """Group of several ranks; its methods cost some ten microseconds less than torch's functions around them."""
        return self.group

    def _exchanges(self, tensor: Tensor) -> bool:
        """Whether ranks exchange summands and add them here, because the group would add them in its own order."""
        return self.in_tree and not self.shares_memory and tensor.is_floating_point()

    @waits("all_reduce")
    def _all_reduce_in_tree_(self, tensor: Tensor) -> Tensor:
        """Sum with all additions in one fixed order; in a ring, the order depends on an element's position."""
        self.recorder.add(self.name, "all_reduce", tensor)
        dense = tensor.contiguous()
        tree.start_sum_(dense.detach().view(-1), self._group, self.in_tree).wait()
        return tensor if dense is tensor else tensor.copy_(dense)

    def _reduce_contiguous(self, tensor: Tensor, options: Any) -> None:
        # A collective on a non-contiguous view may work on a copy and drop the result.
        dense = tensor.contiguous()
        self._group.allreduce([dense], options).wait()
        if dense is not tensor:
            tensor.copy_(dense)


# No compiler can follow the Python of an `Axis` collective. Compiled code calls an operator instead, which takes the
# axis as an input, so that one compilation serves layers on different axes.


def all_reduce(x: Tensor, axis: RankGroup) -> Tensor:
    """Return the sum of `x` over the axis; not differentiable."""
    return _all_reduce(x, axis.handle) if torch.compiler.is_compiling() else axis.all_reduce(x)


def all_reduce_max(x: Tensor, axis: RankGroup) -> Tensor:
    """Return the maximum of `x` over the axis; not differentiable."""
    return _all_reduce_max(x, axis.handle) if torch.compiler.is_compiling() else axis.all_reduce_max_(x.clone())


def _like(x: Tensor, axis: Handle) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("all_reduce", _like)
def _all_reduce(x: Tensor, axis: Handle) -> Tensor:
    total: Tensor = axis.value.all_reduce(x)
    return total


@operator("all_reduce_max", _like)
def _all_reduce_max(x: Tensor, axis: Handle) -> Tensor:
    largest: Tensor = axis.value.all_reduce_max_(x.clone(memory_format=torch.contiguous_format))
    return largest


def differentiable(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> type[torch.autograd.Function]:
    """Make an autograd function of `forward(x, axis, …)`, whose backward pass is `backward(gradient, axis, …)`."""

    class _Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *where: Any) -> Tensor:
            ctx.where = where
            return forward(x, *where)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return backward(grad, *ctx.where), *(None,) * len(ctx.where)

    return _Collective


_CopyTo = differentiable(lambda x, axis: x.view_as(x), all_reduce)
_ReduceFrom = differentiable(all_reduce, lambda grad, axis: grad)


def copy_to(x: Tensor, axis: RankGroup) -> Tensor:
    """Return `x` unchanged, before ranks compute with their own shards; backward all-reduces the gradients."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: RankGroup) -> Tensor:
    """All-reduce `x` over the axis; backward is the identity."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)
