"""Attention of exact runs whose grain has several context pieces, with the bits of one process on any number of ranks.

The queries of each chunk attend separately, as on a rank that holds only two chunks, so no tile of attention crosses
the bounds of a chunk. The gradients of keys and values are summed over the two chunks of a context piece, then over the
pieces in a tree, whose upper part is over the context ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from threefold.comm.axis import Axis, reduce_scatter
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.ops.exact import widened
from threefold.ops.exact_products import tree_sum
from threefold.parallel.context import SequenceChunk, by_rank, in_order, of_chunk
from threefold.random.rng import Slice


class ExactContextAttention(nn.Module):
    """Causal attention with all-gathered keys and values, for the queries of this rank's `heads`, in an exact run.

    Args:
        core: attention of the whole model.
        axis: context ranks.
        heads: heads of this rank.
        pieces: context pieces of the run's grain, a multiple of the ranks.
    """

    def __init__(self, core: CausalAttention, axis: Axis, heads: Slice, pieces: int) -> None:
        super().__init__()
        self.axis, self.own = axis, pieces // axis.size
        first = self.own * axis.index
        numbers = [first + each for each in range(self.own)]
        numbers += [2 * pieces - 1 - each for each in reversed(numbers)]
        self.numbers = numbers
        self.chunks = nn.ModuleList(of_chunk(core, heads, SequenceChunk(number, 2 * pieces)) for number in numbers)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Attend as `ContextParallelAttention.forward` does, with the same shapes."""
        size = q.shape[1] // len(self.numbers)
        by_piece = _KeysOfPieces.apply(torch.stack([k, v]), self.axis, self.own)
        keys = [each.unbind() for each in by_piece]
        out = []
        for place, (number, attend, queries) in enumerate(
            zip(self.numbers, self.chunks, q.split(size, 1), strict=True)
        ):
            whole_k, whole_v = keys[min(place, 2 * self.own - 1 - place)]
            end = (number + 1) * size
            out.append(attend(queries, whole_k[:, :end], whole_v[:, :end], samples))
        return torch.cat(out, 1)


class _KeysOfPieces(torch.autograd.Function):
    """Keys and values [2, B, S, heads, d] of the whole sequence, once for each context piece of this rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, pieces: int) -> tuple[Tensor, ...]:
        ctx.axis = axis
        whole = in_order(own, axis, 2)
        return tuple(whole.view_as(whole) for _ in range(pieces))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = tree_sum(widened(each).clone() for each in grads)
        own = reduce_scatter(by_rank(total, ctx.axis, 2), ctx.axis, 2)
        return own.to(grads[0].dtype), None, None
