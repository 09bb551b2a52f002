"""The global norm of the gradient: each element of the whole model counted once, wherever its copies and shards are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import is_split
from threefold.torch_private.tensors import foreach_norm
from threefold.train.optimizer import Entry

_NORM_PIECE = 1 << 14  # elements


def local_squared_norm(model: TrainableModel, entries: Sequence[Entry]) -> Tensor:
    """This rank's term of the squared norm: of the gradients that it is the one to count. fp64 scalar."""
    counted = [entry.gradient for entry in entries if _is_counted(model, entry)]
    return squared_norm(counted) if counted else _zero(model)


def uncounted_overflow(model: TrainableModel, entries: Sequence[Entry]) -> Tensor:
    """Zero, or not a number where a gradient that another rank counts is not finite on this one. fp64 scalar.

    The ranks that have a gradient in common have the same bits of it, unless memory or a link of one fails: then the
    norm would be finite, and the update of this rank alone would spoil its weights.
    """
    others = [entry.gradient for entry in entries if not _is_counted(model, entry)]
    return 0 * squared_norm(others) if others else _zero(model)


def _is_counted(model: TrainableModel, entry: Entry) -> bool:
    return (
        model.gradients.is_in_norm(entry.leaf)
        and model.tied.is_primary(entry.name)
        and (is_split(entry.parameter) or model.parallelism.mesh.tp.is_first)
    )


def _zero(model: TrainableModel) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=model.parallelism.mesh.device)


def overflow(entries: Sequence[Entry]) -> Tensor:
    """Zero, or not a number where any gradient of this rank overflowed, those included that another rank counts."""
    return 0 * squared_norm([entry.gradient for entry in entries])


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements, in fp64.

    Torch adds the squares of a tensor up in its own dtype, which for fp32 and millions of elements loses three digits;
    by short pieces it loses none that matter, at a third of the cost of working in fp64 throughout.
    """
    pieces = [piece for tensor in tensors for piece in tensor.flatten().split(_NORM_PIECE)]
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    return torch.stack(foreach_norm(pieces, dtype=wide)).double().square().sum()
