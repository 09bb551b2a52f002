"""The two forms of a sharded parameter: the `DTensor` that is stored, and the plain leaf that a rank computes with.

The `DTensor` has the global shape and the placement, so checkpoints, counts and comparisons use global tensors. The
forward pass computes with a plain leaf that shares its memory: on a CPU, dispatch through `DTensor` costs many times as
much as a small layer's own operations. If ZeRO shards a parameter further, another `DTensor` describes both shardings.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from threefold.torch_private.distributed import fresh_parameter


def as_stored(shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor) -> DTensor:
    """Wrap this rank's shard as a tensor of the global shape and stride of `whole`."""
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def local(parameter: Tensor) -> Tensor:
    """Return the tensor that this rank computes with and trains: the parameter, or the plain leaf of a `DTensor`.

    Gradients accumulate on this leaf.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    leaf: Tensor | None = getattr(parameter, "local_leaf", None)
    if leaf is None:
        with torch.no_grad():  # autograd would record the view otherwise
            leaf = parameter.to_local().detach().requires_grad_(parameter.requires_grad)
        parameter.local_leaf = leaf  # type: ignore[attr-defined]
    return leaf


def stored_as(stored: Tensor, leaf: nn.Parameter) -> nn.Parameter:
    """Return a parameter stored as `stored` for which `local` returns `leaf`, which shares its memory."""
    if not isinstance(stored, DTensor):
        return leaf
    parameter = fresh_parameter(stored)
    parameter.local_leaf = leaf  # type: ignore[attr-defined]
    return parameter


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """Wrap a tensor of the local shard's shape (a gradient, an optimizer state) the way the parameter is stored."""
    if not isinstance(parameter, DTensor):
        return shard
    return as_stored(shard, parameter.device_mesh, parameter.placements, parameter)


def stored(parameter: nn.Parameter) -> nn.Parameter:
    """Return a module's parameter as a tensor of the whole model: itself, unless ZeRO shards it further."""
    return getattr(parameter, "stored_whole", parameter)


def keep_stored(parameter: nn.Parameter, whole: Tensor) -> None:
    """Record what `stored` returns for a parameter that ZeRO shards: `whole`, which has all its shardings."""
    parameter.stored_whole = nn.Parameter(whole, parameter.requires_grad)  # type: ignore[attr-defined]
