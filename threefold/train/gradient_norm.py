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
    mesh = model.parallelism.mesh
    counted = [
        entry.gradient
        for entry in entries
        if model.gradients.is_in_norm(entry.leaf)
        and model.tied.is_primary(entry.name)
        and (is_split(entry.parameter) or mesh.tp.is_first)
    ]
    return squared_norm(counted) if counted else torch.zeros((), dtype=torch.float64, device=mesh.device)


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
