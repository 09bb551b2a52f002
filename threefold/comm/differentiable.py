"""Collectives of layers: differentiable functions of a tensor and an axis, which compiled code can call.

No compiler can follow the Python of an `Axis` collective. Compiled code calls an operator instead, which takes the axis
as an input, so that one compilation serves layers on different axes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from threefold.comm.axis import Axis, local_part
from threefold.torch_private.runtime import Handle, operator


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of `x` over the axis; not differentiable."""
    return _all_reduce(x, axis.handle) if torch.compiler.is_compiling() else axis.all_reduce(x)


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
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


def _local_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return local_part(x, axis, dim).contiguous()


def _gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return axis.all_gather(x, dim)


def differentiable(
    forward: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    again: Callable[[], type[torch.autograd.Function]] | None = None,
) -> type[torch.autograd.Function]:
    """Make an autograd function of `forward(x, axis, …)`, whose backward pass is `backward(gradient, axis, …)`.

    `again` returns the function whose forward pass is `backward`, for gradients of gradients.
    """

    class _Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *where: Any) -> Tensor:
            ctx.where = where
            return forward(x, *where)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            if again is not None and grad.requires_grad and not torch.compiler.is_compiling():
                return again().apply(grad, *ctx.where), *(None,) * len(ctx.where)
            return backward(grad, *ctx.where), *(None,) * len(ctx.where)

    return _Collective


_Function = type[torch.autograd.Function]
_CopyTo: _Function = differentiable(lambda x, axis: x.view_as(x), all_reduce, lambda: _ReduceFrom)
_ReduceFrom: _Function = differentiable(all_reduce, lambda grad, axis: grad, lambda: _CopyTo)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Return `x` unchanged, before ranks compute with their own shards; backward all-reduces the gradients."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce `x` over the axis; backward is the identity."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


_GatherFrom: _Function = differentiable(_gather, _local_part, lambda: _ScatterTo)
_ScatterTo: _Function = differentiable(_local_part, _gather, lambda: _GatherFrom)
_GatherShares: _Function = differentiable(all_gather_equal, reduce_scatter, lambda: _ReduceToShares)
_ReduceToShares: _Function = differentiable(reduce_scatter, all_gather_equal, lambda: _GatherShares)


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
