"""Collectives of one axis of the mesh, and the differentiable gathers and scatters of layers.

`comm.reductions` defines the sums.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from threefold.comm import tree
from threefold.comm.layout import shard_bounds
from threefold.comm.reductions import RankGroup, differentiable, waits
from threefold.errors import UserError
from threefold.torch_private.distributed import all_gather_options, reduce_scatter_options
from threefold.torch_private.runtime import Handle, operator


def dumps(value: Any) -> bytes:
    """Pickle a value with tensors into bytes that `pickle.loads` reads.

    Tensors are pickled by value, even if they share memory; a replicated `DTensor` becomes a plain tensor.

    Raises:
        UserError: a `DTensor` is sharded or partial; it could outlive the mesh of its ranks.
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


_GATHER, _SCATTER = all_gather_options(), reduce_scatter_options()


class Axis(RankGroup):
    """Group of ranks that differ from this one along one axis only, with its collectives.

    Attributes:
        name: `dp`, `pp`, `cp`, `tp`, `world`, or the name given to `Mesh.new_axis`.
        ranks: global ranks of the group, in the order of the axis.
        index: this rank's index in `ranks`.
        group: process group of the ranks, for `torch.distributed`, and a `SharedMemoryGroup` if they share memory; None
            in a single process.
        device_mesh: one-dimensional mesh for the `DTensor`s of this axis; None for groups that are not an axis.
        heartbeat: heartbeat in which this rank notes its waits, under the axis's `number`.
        in_tree: whether sums of floating-point numbers are computed in a balanced binary tree over the ranks, with
            every node rounded to the tensor's dtype, on every backend (exact runs).
        handle: opaque reference to this axis, for operators of compiled code.
    """

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
        self._group.all_gather_single(parts.view(-1), tensor.contiguous().view(-1), _GATHER).wait()
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
            self._group.reduce_scatter_single(part.view(-1), parts.view(-1), _SCATTER).wait()
        return part

    @waits("all_to_all")
    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to each rank and receive rows from each (all-to-all).

        Args:
            rows: [sum(sent), …], in the order of the ranks that they are sent to.
            sent, received: number of rows to and from each rank.

        Returns:
            [sum(received), …], in the order of the ranks that sent them.
        """
        if self.size == 1:
            return rows
        self.recorder.add(self.name, "all_to_all", rows)
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self.group)
        return arrived

    def start_shift(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to send `tensor` to the next rank (the last sends to the first); return a function that receives.

        That function waits for the previous rank's tensor and returns it.
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
            self._finish_shift(works)
            operations.clear()  # kept the sent tensor alive until now
            return received

        return finish

    @waits("receive")
    def _finish_shift(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait()

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

    @waits("barrier")
    def barrier(self) -> None:
        """Wait until every rank of the axis has called this method."""
        if self.size > 1:
            dist.barrier(group=self.group)


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


def all_gather_equal(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Concatenate the ranks' tensors, all of one shape, along `dim`; not differentiable."""
    if axis.size > 1 and torch.compiler.is_compiling():
        return _all_gather_equal(x, axis.handle, dim % x.dim(), axis.size)
    return axis.all_gather_equal(x, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's equal shard of the sum of `x` over the axis, along `dim`; not differentiable."""
    if axis.size > 1 and torch.compiler.is_compiling():
        return _reduce_scatter(x, axis.handle, dim % x.dim(), axis.size)
    return axis.reduce_scatter(x, dim)


@operator(
    "all_gather_equal", lambda x, _, dim, ranks: x.new_empty(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
)
def _all_gather_equal(x: Tensor, axis: Handle, dim: int, ranks: int) -> Tensor:
    joined: Tensor = axis.value.all_gather_equal(x, dim).contiguous()
    return joined


@operator(
    "reduce_scatter", lambda x, _, dim, ranks: x.new_empty(*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])
)
def _reduce_scatter(x: Tensor, axis: Handle, dim: int, ranks: int) -> Tensor:
    shard: Tensor = axis.value.reduce_scatter(x, dim).contiguous()
    return shard


def local_part(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's shard of an unsharded tensor along `dim`, as a view."""
    start, end = shard_bounds(tensor.shape[dim], axis.size, axis.index)
    return tensor.narrow(dim, start, end - start)


def _own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return local_part(x, axis, dim).contiguous()


def _gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return axis.all_gather(x, dim)


_GatherFrom = differentiable(_gather, _own_part)
_ScatterTo = differentiable(_own_part, _gather)
_GatherShares = differentiable(all_gather_equal, reduce_scatter)
_ReduceToShares = differentiable(reduce_scatter, all_gather_equal)


class _GatherAgain(torch.autograd.Function):
    """Identity that frees the storage of the gathered tensor, saved to compute `out`, until the backward pass."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, joined: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        ctx.save_for_backward(x, joined)
        joined.untyped_storage().resize_(0)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, joined = ctx.saved_tensors
        again = all_gather_equal(x, ctx.axis, ctx.dim)
        joined.untyped_storage().resize_(again.nbytes)
        joined.data.copy_(again)  # hidden from autograd, as the values are unchanged
        return grad, None, None, None, None


def gather_from(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """All-gather `x` along `dim`; backward takes this rank's shard of the gradient."""
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim)


def scatter_to(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Take this rank's shard of a replicated `x` along `dim`; backward all-gathers the gradients."""
    return x if axis.size == 1 else _ScatterTo.apply(x, axis, dim)


def gather_shares(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All-gather equal shards along `dim` for results that differ by rank; backward reduce-scatters the gradients."""
    return x if axis.size == 1 else _GatherShares.apply(x, axis, dim)


def over_gathered(compute: Callable[[Tensor], Tensor], x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return `compute(gather_shares(x, axis, dim))`, keeping only the shard `x` for the backward pass.

    The backward pass gathers again (Korthikanti et al., section 4.2.2). `compute` may save its argument for its
    backward pass, but must return nothing that shares its memory.
    """
    if axis.size > 1 and torch.compiler.is_compiling():
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        kept: Tensor = recomputed(lambda shard: compute(gather_shares(shard, axis, dim)), x)
        return kept
    joined = gather_shares(x, axis, dim)
    out = compute(joined)
    return _GatherAgain.apply(out, x, joined, axis, dim) if axis.size > 1 and out.requires_grad else out


def reduce_to_shares(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Reduce-scatter `x` into equal shards along `dim`; backward all-gathers the gradients."""
    return x if axis.size == 1 else _ReduceToShares.apply(x, axis, dim)
