"""The axis of the mesh: its collectives, and the record of collectives."""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from threefold.comm import tree
from threefold.comm.heartbeat import Heartbeat, wait_code
from threefold.comm.layout import shard_bounds
from threefold.errors import UserError
from threefold.torch_private.distributed import (
    BLOCKING_GATHER,
    BLOCKING_MAX,
    BLOCKING_SCATTER,
    BLOCKING_SUM,
    PythonGroup,
)
from threefold.torch_private.runtime import Handle
from threefold.torch_private.tensors import foreach_copy_

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Axis = TypeVar("_Axis", bound="Axis")
_Method = Callable[Concatenate[_Axis, _P], _T]


def waits(operation: str) -> Callable[[_Method[_Axis, _P, _T]], _Method[_Axis, _P, _T]]:
    """Note in the heartbeat that this rank waits for the others of the axis while the decorated method runs."""
    first_code = wait_code(operation, 0)

    def decorate(method: _Method[_Axis, _P, _T]) -> _Method[_Axis, _P, _T]:
        @wraps(method)
        def waiting(self: _Axis, *args: _P.args, **options: _P.kwargs) -> _T:
            if len(self.ranks) == 1:
                return method(self, *args, **options)
            self.heartbeat.wait(first_code + self.number)
            try:
                return method(self, *args, **options)
            finally:
                self.heartbeat.resume()

        return waiting

    return decorate


@dataclass(frozen=True)
class Event:
    """One recorded collective: the axis's name, the operation, and its bytes.

    The operation is one of `comm.heartbeat.OPERATIONS` that sends. The bytes are of the unsharded tensor: the input of
    an all-reduce or a reduce-scatter, the output of an all-gather, the rows that this rank sends in an all-to-all.
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


REFUSED: Final = "it calls a collective, which the other ranks do not"


class HostGroup(PythonGroup):
    """Process group of ranks of one host that an attached room makes of gloo's (hook `over_shared_memory`).

    Its collectives of CPU tensors go through shared memory and give the same bits on all ranks, as they add in a binary
    tree over the ranks.
    """

    _refuses = False

    def sum_of(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor`, of any shape, over the ranks: `all_reduce` without a copy of the summand."""
        raise NotImplementedError

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise a `RuntimeError` from collectives in the block, which the other ranks do not run."""
        self._refuses = True
        try:
            yield
        finally:
            self._refuses = False

    def require_collectives(self) -> None:
        """Raise a `RuntimeError` in a `refusing` block."""
        if self._refuses:
            raise RuntimeError(REFUSED)


@dataclass(frozen=True)
class Axis:
    """Group of ranks that differ from this one along one axis only, with its collectives.

    Attributes:
        name: `dp`, `pp`, `cp`, `tp`, `ep`, `world`, or the name of a further group, such as `dp·cp` or `tie`.
        ranks: global ranks of the group, in the order of the axis.
        index: this rank's index in `ranks`.
        group: process group of the ranks, for `torch.distributed`, and a `HostGroup` if they share memory; None in a
            single process.
        device_mesh: one-dimensional mesh for the `DTensor`s of this axis; None for groups that are not an axis.
        heartbeat: heartbeat in which this rank notes its waits, under the axis's `number`.
        in_tree: whether sums of floating-point numbers are computed in a balanced binary tree over the ranks, with
            every node rounded to the tensor's dtype, on every backend (exact runs).
        handle: opaque reference to this axis, for operators of compiled code.
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

    def __deepcopy__(self, memo: Any) -> "Axis":
        return self  # the copy of a layer is on the same ranks

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def shares_memory(self) -> bool:
        """Whether collectives of CPU tensors go through shared memory."""
        return isinstance(self.group, HostGroup)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the axis."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last of the axis."""
        return self.index == self.size - 1

    @property
    def first(self) -> int:
        """Global rank of the first rank of the axis."""
        return self.ranks[0]

    @property
    def last(self) -> int:
        """Global rank of the last rank of the axis."""
        return self.ranks[-1]

    @property
    def previous(self) -> int:
        """Global rank of the previous rank on the axis; the first rank's is the last (a ring)."""
        return self.ranks[self.index - 1]

    @property
    def next(self) -> int:
        """Global rank of the next rank on the axis; the last rank's is the first (a ring)."""
        return self.ranks[(self.index + 1) % self.size]

    @waits("all_reduce")
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the axis, bitwise equal on every rank; `tensor` is unchanged."""
        if isinstance(self.group, HostGroup) and not isinstance(tensor, DTensor):
            self.recorder.add(self.name, "all_reduce", tensor)
            return self.group.sum_of(tensor)
        return self.all_reduce_(tensor.clone(memory_format=torch.contiguous_format))

    @waits("all_reduce")
    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the axis, in place; the result is bitwise equal on every rank.

        If it is a `DTensor`, such as the gradient of a parallel layer, this rank's shard is summed.
        """
        if self.size == 1:
            return tensor
        if isinstance(tensor, DTensor):
            self.all_reduce_(self._shard(tensor))
            return tensor
        if self._exchanges(tensor):
            return self._all_reduce_in_tree_(tensor)
        self.recorder.add(self.name, "all_reduce", tensor)
        self._reduce_contiguous(tensor, BLOCKING_SUM)
        return tensor

    def all_reduce_values(self, tensor: Tensor) -> list[Any]:
        """Sum a one-dimensional `tensor` over the axis, in place, and return its elements."""
        summed = self.all_reduce_(tensor)
        # On a GPU, reading the values is what waits for the other ranks.
        with nullcontext() if tensor.is_cpu else self.waiting("all_reduce"):
            return list(summed.tolist())

    def all_reduce_together_(self, tensors: Sequence[Tensor], in_order: bool = False) -> None:
        """Sum several tensors of one dtype, in the same order on all ranks, over the axis, in place, in one all-reduce.

        With `in_order`, an element's sum does not depend on its position among the tensors, nor on their sizes.
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
        self._reduce_contiguous(tensor, BLOCKING_MAX)
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
        """Note in the heartbeat that a block, which uses the process group directly, waits for the others."""
        return self.heartbeat.waiting(wait_code(operation, self.number))

    @waits("all_gather")
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, where their sizes may differ."""
        if self.size == 1:
            return tensor
        assert self.group is not None  # of several ranks
        joined = gather_uneven(tensor, self.group, dim)
        self.recorder.add(self.name, "all_gather", joined)
        return joined

    @waits("all_gather")
    def all_gather_equal(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors, all of one shape, along `dim`."""
        if self.size == 1:
            return tensor
        self.recorder.add(self.name, "all_gather", tensor, parts=self.size)
        parts = tensor.new_empty(self.size, *tensor.shape)
        self._group.all_gather_single(parts.view(-1), tensor.contiguous().view(-1), BLOCKING_GATHER).wait()
        dim %= tensor.dim()
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    @waits("reduce_scatter")
    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of the sum of `tensor` over the axis, in equal shards along `dim`.

        Raises:
            ValueError: the size of `dim` is not divisible by the axis.
        """
        if self.size == 1:
            return tensor
        if tensor.shape[dim] % self.size:
            raise ValueError(f"dim {dim} of shape {[*tensor.shape]} does not divide into {self.size} equal parts")
        self.recorder.add(self.name, "reduce_scatter", tensor)
        dim %= tensor.dim()
        parts = tensor.unflatten(dim, (self.size, tensor.shape[dim] // self.size)).movedim(dim, 0).contiguous()
        part = torch.empty_like(parts[0])
        if self._exchanges(tensor):
            tree.reduce_scatter(part.view(-1), parts.view(-1), self._group)
        else:
            self._group.reduce_scatter_single(part.view(-1), parts.view(-1), BLOCKING_SCATTER).wait()
        return part

    @waits("all_to_all")
    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent` rows to each rank and receive `received` from each, in the order of the ranks (all-to-all)."""
        if self.size == 1:
            return rows
        self.recorder.add(self.name, "all_to_all", rows)
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self.group)
        return arrived

    def start_shift(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to send to the next rank (the last sends to the first), and to receive from the previous one.

        Returns a function that waits and returns the tensor received.
        """
        self.recorder.add(self.name, "send", tensor)
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        operations = [
            dist.P2POp(dist.isend, sent, self.next, self.group),
            dist.P2POp(dist.irecv, received, self.previous, self.group),
        ]
        works = dist.batch_isend_irecv(operations)

        def finish() -> Tensor:
            with nullcontext() if self.size == 1 else self.waiting("receive"):
                for work in works:
                    work.wait()
            operations.clear()  # kept the sent tensor alive until now
            return received

        return finish

    @waits("send")
    def send(self, tensor: Tensor, to: int) -> None:
        """Send `tensor` to index `to` of the axis, and wait until it may be overwritten."""
        self.recorder.add(self.name, "send", tensor)
        dist.send(tensor.contiguous(), self.ranks[to], group=self.group)

    @waits("receive")
    def receive_(self, into: Tensor, source: int) -> Tensor:
        """Receive a tensor from index `source` of the axis into the contiguous `into`."""
        dist.recv(into, self.ranks[source], group=self.group)
        return into

    @waits("broadcast")
    def broadcast_(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast a tensor from index `source` of the axis, in place."""
        if self.size > 1:
            self.recorder.add(self.name, "broadcast", tensor)
            dense = tensor.contiguous()
            dist.broadcast(dense, self.ranks[source], group=self.group)
            if dense is not tensor:
                tensor.copy_(dense)
        return tensor

    @waits("gather")
    def gather_objects(self, value: Any) -> list[Any]:
        """Gather one picklable value from each rank of the axis, in the order of the axis."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, dumps(value), group=self.group)
        return [pickle.loads(each) for each in found]

    def gather_numbers(self, device: torch.device, *numbers: int) -> list[list[int]]:
        """Gather integers from each rank, by an all-reduce on `device`, which is cheap on every backend."""
        table = torch.zeros(self.size, len(numbers), dtype=torch.int64, device=device)
        table[self.index] = torch.tensor(numbers, dtype=torch.int64)
        found: list[list[int]] = self.all_reduce_(table).tolist()
        return found

    @waits("barrier")
    def barrier(self) -> None:
        """Wait until every rank of the axis has called this method."""
        if self.size > 1:
            dist.barrier(group=self.group)

    @property
    def _group(self) -> Any:
        """Group of several ranks; its methods cost some ten microseconds less than torch's functions around them."""
        return self.group

    def _exchanges(self, tensor: Tensor) -> bool:
        """Whether ranks exchange summands and add them here, because the group would add them in its own order."""
        return self.in_tree and not self.shares_memory and tensor.is_floating_point()

    def _shard(self, tensor: DTensor) -> Tensor:
        """Return the shard of a tensor that other axes cut; raise a `UserError` if this one does."""
        mesh = tensor.device_mesh
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard() and set(dist.get_process_group_ranks(mesh.get_group(dim))) & {*self.ranks} != {
                self.ranks[self.index]
            }:
                raise UserError(
                    f"The tensor is cut over {self.name}, so that its ranks hold different elements, which are no "
                    "summands; sum over another axis, such as mesh.dp, or use tensor.full_tensor()."
                )
        with torch.no_grad():
            return tensor.to_local()

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


def gather_uneven(tensor: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Concatenate the tensors of a group's ranks along `dim`, where their sizes may differ."""
    mine = torch.tensor([tensor.shape[dim]], device=tensor.device)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    sizes = [int(each) for each in found]
    moved = tensor.movedim(dim, 0)
    padded = moved.new_zeros((max(sizes), *moved.shape[1:]))
    padded[: moved.shape[0]] = moved
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, dim)


def local_part(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's shard of an unsharded tensor along `dim`, as a view."""
    start, end = shard_bounds(tensor.shape[dim], axis.size, axis.index)
    return tensor.narrow(dim, start, end - start)


def dumps(value: Any) -> bytes:
    """Pickle a value into bytes that `pickle.loads` reads, with tensors by value, even if they share memory.

    A replicated `DTensor` becomes a plain tensor; another one is refused, as it could outlive the mesh of its ranks.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            if not all(placement.is_replicate() for placement in value.placements):
                sizes = " × ".join(map(str, value.shape))
                raise UserError(
                    f"A DTensor of {sizes} was returned, of which a rank has a part ({value.placements}); return "
                    "tensor.full_tensor(), which all ranks of its mesh call."
                )
            return Tensor.detach, (value.to_local().detach(),)
        plain = type(value) is Tensor and value.layout == torch.strided and value.is_cpu and not value.requires_grad
        if not plain or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return _tensor, (bytearray(flat.numpy()), value.dtype, tuple(value.shape))


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
