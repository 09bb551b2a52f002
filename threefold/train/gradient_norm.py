"""Global gradient norm, and sums over ranks whose bits do not depend on the order of the additions (exact runs)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from threefold.comm.mesh import Mesh
from threefold.ops.exact import Grain, from_digits, order_free_digits, row_norms, row_width
from threefold.parallel.gradients import Gradients
from threefold.parallel.parallelize import PieceSizes
from threefold.parallel.parameter import Weight, is_split
from threefold.parallel.pipeline.stage import TiedWeights
from threefold.torch_private.tensors import foreach_norm
from threefold.train.stop import Stop, sum_over_ranks


class GradientNorm:
    """This rank's terms of the global gradient norm, from the current gradients.

    Each gradient counts once, on one of the ranks that hold it.

    Args:
        tied: tied weights that several stages hold; None without them.
        piece: number of neighbouring elements, as in `squared_norm`.
        grain: pieces of an exact run's sums; None for any other run.
    """

    def __init__(
        self,
        gradients: Gradients,
        weights: Iterable[Weight],
        mesh: Mesh,
        tied: TiedWeights | None = None,
        piece: int = PieceSizes.norm_elements,
        grain: Grain | None = None,
    ) -> None:
        self._gradients, self._piece, self._device = gradients, piece, mesh.device
        self._counted: list[Tensor] = []
        self._others: list[Tensor] = []
        self._widths: dict[Tensor, int] = {}
        for weight in weights:
            counts = (
                gradients.is_in_norm(weight.leaf)
                and (tied is None or tied.is_primary(weight.name))
                and (is_split(weight.parameter) or mesh.tp.is_first)
            )
            (self._counted if counts else self._others).append(weight.leaf)
            if counts and grain is not None:
                self._widths[weight.leaf] = row_width(weight.parameter, grain)

    def row_squares(self) -> Tensor:
        """Return the squared norm of each row, or piece of a row, of the gradients that this rank counts. fp64 [n].

        No layout inside the grain cuts them further.
        """
        rows = [row_norms(self._gradients[leaf], width) for leaf, width in self._widths.items() if leaf.numel()]
        if not rows:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        return torch.cat(rows).double().square_()

    def squared(self) -> Tensor:
        """Return this rank's term of the squared norm, over the gradients that it counts. fp64 scalar."""
        return self._of(self._counted)

    def uncounted_overflow(self) -> Tensor:
        """Return 0, or NaN if a gradient that another rank counts is not finite on this rank. fp64 scalar.

        Ranks that share a gradient hold the same bits of it unless the memory or a link of one of them fails. The norm
        would then be finite, and the update of that rank alone would spoil its weights.
        """
        return 0 * self._of(self._others)

    def squared_or_overflow(self) -> Tensor:
        """Return `squared`, or NaN if any gradient of this rank is not finite, counted or not. fp64 scalar."""
        squared = self.squared()
        return squared + 0 * squared + self.uncounted_overflow()

    def _of(self, leaves: Sequence[Tensor]) -> Tensor:
        if not leaves:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return squared_norm(self._gradients.joined(leaves), self._piece)


def squared_norm(tensors: Sequence[Tensor], piece: int = PieceSizes.norm_elements) -> Tensor:
    """Sum the squares of all elements in fp64, `piece` neighbours at a time in their own dtype.

    torch sums the squares of a tensor in the tensor's dtype, which loses three digits for fp32 and millions of
    elements. Short pieces lose none that matter, at a third of the cost of fp64 throughout.
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


def sum_exactly(
    values: Sequence[Tensor], totals: Tensor, mesh: Mesh, stop: Stop | None
) -> tuple[list[float], list[float]]:
    """Sum all elements of tensors over all ranks, in a way that does not depend on the order of the additions.

    Args:
        values: fp64 [n] each; a rank may hold any number of the elements.
        totals: fp64 [m], numbers to sum as `sum_over_ranks` does, in the same collective.

    Returns:
        the sum of each tensor of `values`, and the sums of `totals`.
    """
    tops = torch.stack([torch.cat([each.abs(), each.new_zeros(1)]).amax() for each in values])
    tops = mesh.world.all_reduce_max_(tops)
    digits = torch.stack([order_free_digits(each, top) for each, top in zip(values, tops, strict=True)])
    shared = tops if mesh.world.is_first else torch.zeros_like(tops)  # read with the sums: on a GPU, reading waits
    found = sum_over_ranks(torch.cat([digits.T.flatten(), shared, totals]), mesh, stop)
    count, places = len(values), range(0, digits.numel(), len(values))
    tops_read = found[digits.numel() : digits.numel() + count]
    sums = [from_digits([found[at + each] for at in places], tops_read[each]) for each in range(count)]
    return sums, found[digits.numel() + count :]
