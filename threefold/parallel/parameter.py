"""Parameters that are split over an axis: a `DTensor` to store, a plain tensor to compute with.

The `DTensor` carries the whole shape and the placement, so checkpoints, counts and comparisons see global tensors. The
forward pass computes with a plain leaf that shares its memory: no operation is dispatched through `DTensor`, whose cost
per operation is many times that of a small layer's own on a CPU.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from threefold.parallel.collectives import local_part, shard_bounds
from threefold.parallel.mesh import Axis


def split_parameter(whole: Tensor, axis: Axis, dim: int) -> nn.Parameter:
    """A parameter stored as this rank's shard of `whole` along `dim`.

    Args:
        whole: the unsplit values, or a tensor on the meta device for the shape alone.
        axis: the mesh axis to split over.
        dim: the dimension to split; its size need not be divisible.
    """
    # A dense copy, so that nothing keeps the whole tensor alive.
    return _as_parameter(local_part(whole.detach(), axis, dim).clone(), whole.shape, axis, dim)


def empty_parameter(shape: tuple[int, ...], axis: Axis, dim: int, device: torch.device | None = None) -> nn.Parameter:
    """A parameter of the whole shape `shape`, of which this rank stores an uninitialised shard along `dim`."""
    start, end = shard_bounds(shape[dim], axis.size, axis.index)
    local = torch.empty(*shape[:dim], end - start, *shape[dim + 1 :], device=device)
    return _as_parameter(local, torch.Size(shape), axis, dim)


def _as_parameter(local: Tensor, shape: torch.Size, axis: Axis, dim: int) -> nn.Parameter:
    if axis.device_mesh is None:
        raise ValueError(f"axis {axis.name!r} is not an axis of the mesh, so no parameter can be split over it")
    stride = torch.empty(shape, device="meta").stride()
    return nn.Parameter(
        DTensor.from_local(local, axis.device_mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    )


def local(parameter: Tensor) -> Tensor:
    """What this rank computes with and trains: the parameter itself, or the plain leaf that shares a `DTensor`'s shard.

    Gradients arrive on this leaf (`gradient` gives them back as a global tensor).
    """
    if not isinstance(parameter, DTensor):
        return parameter
    leaf: Tensor | None = getattr(parameter, "_leaf", None)
    if leaf is None:
        leaf = parameter._local_tensor.detach().requires_grad_(parameter.requires_grad)
        parameter._leaf = leaf  # type: ignore[attr-defined]
    return leaf


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """Wrap a tensor of the local shard's shape (a gradient, an optimizer state) as the parameter itself is stored."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def gradient(parameter: Tensor) -> Tensor | None:
    """The parameter's gradient, stored as the parameter is (a `DTensor` if split); None before a backward pass."""
    grad = local(parameter).grad
    return None if grad is None else like(parameter, grad)


def whole(tensor: Tensor) -> Tensor:
    """The unsplit tensor, on every rank. Collective over the axis that it is split over."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def offset(parameter: Tensor) -> tuple[int, ...]:
    """Where this rank's shard starts in the whole parameter, per dim."""
    starts = [0] * parameter.dim()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                size, index = mesh.size(axis), mesh.get_local_rank(axis)
                starts[placement.dim] = shard_bounds(parameter.shape[placement.dim], size, index)[0]
    return tuple(starts)


def is_split(parameter: Tensor) -> bool:
    """Whether the ranks of an axis hold different parts of it."""
    return isinstance(parameter, DTensor)
