"""The two forms of a sharded parameter: the `DTensor` that is stored, and the plain leaf that a rank computes with.

The `DTensor` has the global shape and the placement, so checkpoints, counts and comparisons use global tensors. The
forward pass computes with a plain leaf that shares its memory: on a CPU, dispatch through `DTensor` costs many times as
much as a small layer's own operations. If ZeRO shards a parameter further, another `DTensor` describes both shardings.

A layer in a loop of the user's has no leaf: it computes with the shard of its parameter, a `SPLIT_TENSOR`, which gets
the gradient. An engine takes it over by asking for its leaf (`local`).
"""

from collections.abc import Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from threefold.doors import hook
from threefold.torch_private.distributed import fresh_parameter, shard_of, split_like

SPLIT_TENSOR: Final[type[DTensor]] = hook("split_tensor") or DTensor
"""Class of the weights of layers that stand alone: one that torch's optimizers take, from an attached room."""
_KEPT_HERE: Final = frozenset({"local_leaf", "stored_whole", "_is_param"})
"""Attributes of a parameter that are set by this module, or by torch, and are its own."""
_Made = TypeVar("_Made", bound=Tensor)


def with_marks(made: _Made, original: Tensor) -> _Made:
    """Give a tensor made from a parameter the attributes that a model has set on that, such as `no_weight_decay`."""
    vars(made).update({name: value for name, value in vars(original).items() if name not in _KEPT_HERE})
    return made


def as_stored(shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor) -> DTensor:
    """Wrap this rank's shard as a tensor of the global shape and stride of `whole`."""
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def local(parameter: Tensor) -> Tensor:
    """Return the tensor that this rank computes with and trains: the parameter, or the plain leaf of a `DTensor`.

    Gradients accumulate on this leaf, from the first time that it is asked for.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    leaf: Tensor | None = getattr(parameter, "local_leaf", None)
    if leaf is None:
        with torch.no_grad():  # autograd would record the view otherwise
            leaf = with_marks(parameter.to_local().detach(), parameter).requires_grad_(parameter.requires_grad)
        parameter.local_leaf = leaf  # type: ignore[attr-defined]
    return leaf


def held(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, to read or set; it has the same memory, and no gradient."""
    return shard_of(parameter).detach() if isinstance(parameter, DTensor) else parameter.detach()


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
    if isinstance(parameter, SPLIT_TENSOR):
        return split_like(SPLIT_TENSOR, shard, parameter)
    return as_stored(shard, parameter.device_mesh, parameter.placements, parameter)


def stored(parameter: nn.Parameter) -> nn.Parameter:
    """Return a module's parameter as a tensor of the whole model: itself, unless ZeRO shards it further."""
    return getattr(parameter, "stored_whole", parameter)


def keep_stored(parameter: nn.Parameter, whole: Tensor) -> None:
    """Record what `stored` returns for a parameter that ZeRO shards: `whole`, which has all its shardings."""
    kept = with_marks(nn.Parameter(whole, parameter.requires_grad), parameter)
    parameter.stored_whole = kept  # type: ignore[attr-defined]
