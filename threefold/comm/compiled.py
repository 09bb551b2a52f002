"""The collectives of an axis on plain tensors, which compiled code calls as operators; not differentiable.

A collective of an `Axis` is Python that no compiler can follow. Compiled code calls an operator instead, which gets the
axis as an input, so one compilation serves layers of different axes.
"""

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.torch_private.operators import Handle, operator


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of `x` over the axis."""
    return _all_reduce(x, axis.handle) if torch.compiler.is_compiling() else axis.all_reduce(x)


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """The maximum of `x` over the axis."""
    return _all_reduce_max(x, axis.handle) if torch.compiler.is_compiling() else axis.all_reduce_max_(x.clone())


def all_gather_equal(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The ranks' tensors, all of one shape, joined along `dim`."""
    if axis.size > 1 and torch.compiler.is_compiling():
        return _all_gather_equal(x, axis.handle, dim % x.dim(), axis.size)
    return axis.all_gather_equal(x, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's shard of the sum of `x` over the axis, of equal shards along `dim`.

    Raises:
        ValueError: the size of `dim` is not divisible by the axis.
    """
    if axis.size > 1 and torch.compiler.is_compiling():
        return _reduce_scatter(x, axis.handle, dim % x.dim(), axis.size)
    return axis.reduce_scatter(x, dim)


def _like(x: Tensor, axis: Handle) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _joined(x: Tensor, axis: Handle, dim: int, ranks: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])


def _shard(x: Tensor, axis: Handle, dim: int, ranks: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])


@operator("all_reduce", _like)
def _all_reduce(x: Tensor, axis: Handle) -> Tensor:
    total: Tensor = axis.value.all_reduce(x)
    return total


@operator("all_reduce_max", _like)
def _all_reduce_max(x: Tensor, axis: Handle) -> Tensor:
    largest: Tensor = axis.value.all_reduce_max_(x.clone(memory_format=torch.contiguous_format))
    return largest


@operator("all_gather_equal", _joined)
def _all_gather_equal(x: Tensor, axis: Handle, dim: int, ranks: int) -> Tensor:
    joined: Tensor = axis.value.all_gather_equal(x, dim).contiguous()
    return joined


@operator("reduce_scatter", _shard)
def _reduce_scatter(x: Tensor, axis: Handle, dim: int, ranks: int) -> Tensor:
    shard: Tensor = axis.value.reduce_scatter(x, dim).contiguous()
    return shard
