"""The global norm of the gradient: each element of the whole model counted once, wherever its copies and shards are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import is_split
from threefold.parallel.settings import PieceSizes
from threefold.torch_private.tensors import foreach_norm
from threefold.train.optimizer import Entry


class GradientNorm:
    """This rank's terms of the norm, of gradients as they are when asked for.

    Args:
        model: which it trains.
        entries: its weights.
        piece: elements whose squares are added up in the gradients' own dtype.
    """

    def __init__(self, model: TrainableModel, entries: Sequence[Entry], piece: int = PieceSizes.norm_elements) -> None:
        self._gradients, self._piece = model.gradients, piece
        self._counted = [entry.leaf for entry in entries if _is_counted(model, entry)]
        self._others = [entry.leaf for entry in entries if not _is_counted(model, entry)]
        self._device = model.parallelism.mesh.device

    def squared(self) -> Tensor:
        """This rank's term of the squared norm: of the gradients that it is the one to count. fp64 scalar."""
        return self._of(self._counted)

    def uncounted_overflow(self) -> Tensor:
        """Zero, or not a number where a gradient that another rank counts is not finite on this one. fp64 scalar.

        The ranks that have a gradient in common have the same bits of it, unless memory or a link of one fails: then
        the norm would be finite, and the update of this rank alone would spoil its weights.
        """
        return 0 * self._of(self._others)

    def squared_or_overflow(self) -> Tensor:
        """`squared`, or not a number where any gradient of this rank is not finite, those included that another rank
        counts. fp64 scalar."""
        squared = self.squared()
        return squared + 0 * squared + self.uncounted_overflow()

    def _of(self, leaves: Sequence[Tensor]) -> Tensor:
        if not leaves:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return squared_norm(self._gradients.joined(leaves), self._piece)


def _is_counted(model: TrainableModel, entry: Entry) -> bool:
    return (
        model.gradients.is_in_norm(entry.leaf)
        and model.tied.is_primary(entry.name)
        and (is_split(entry.parameter) or model.parallelism.mesh.tp.is_first)
    )


def squared_norm(tensors: Sequence[Tensor], piece: int = PieceSizes.norm_elements) -> Tensor:
    """Sum of squares of all elements, in fp64; those of `piece` neighbours are added up in their own dtype.

    Torch adds the squares of a tensor up in its own dtype, which for fp32 and millions of elements loses three digits;
    by short pieces it loses none that matter, at a third of the cost of working in fp64 throughout.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms, rest = [], []
    for tensor in tensors:
        flat = tensor.flatten()
        in_pieces = flat.numel() // piece * piece
        if in_pieces:
            norms.append(torch.linalg.vector_norm(flat[:in_pieces].view(-1, piece), dim=1, dtype=wide))
        if in_pieces < flat.numel() or not in_pieces:
            rest.append(flat[in_pieces:])
    if rest:
        norms.append(torch.stack(foreach_norm(rest, dtype=wide)))
    return torch.cat(norms).double().square().sum()
