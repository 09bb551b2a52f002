"""QK-norm over the whole width (`WidthNorm`), of which each tensor rank has some heads."""

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.comm.differentiable import copy_to, reduce_from
from threefold.models.layers.norms import WidthNorm


class ParallelWidthNorm(WidthNorm):
    """`WidthNorm` of this rank's heads; each rank has the whole weight, and a partial gradient of it.

    Of several ranks that share a key head, each counts its part of the head's squares, and has its part of the gradient
    of the head's keys.
    """

    def __init__(self, norm: WidthNorm, axis: Axis) -> None:
        with torch.device("meta"):
            super().__init__(norm.heads, norm.head_dim, norm.eps, norm.offset)
        self.axis, self.weight = axis, norm.weight

    def total(self, squares: Tensor, heads: int) -> Tensor:
        """Return the sum of the squares of all heads from that of this rank's `heads`."""
        ranks = heads * self.axis.size // self.heads  # that share a head
        # Each rank's result depends on the sum, so the gradient of the sum is the sum of the ranks' gradients.
        return copy_to(reduce_from(squares / ranks, self.axis), self.axis)

    def of_heads(self, factors: Tensor, heads: int) -> Tensor:
        """Return the rows of `factors` [all heads, d] of this rank's `heads`."""
        return factors.narrow(0, self.axis.index * self.heads // self.axis.size, heads)
