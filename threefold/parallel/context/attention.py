"""Context parallelism: causal attention over a sequence whose positions are spread over ranks.

Keys and values are all-gathered, queries stay (Llama 3, arXiv 2407.21783, section 3.3.2). A rank holds two chunks of
the sequence, the i-th and the i-th from the end (`SequenceCut`); each attends to the keys up to its own end, which
together is the same work on every rank. The gradients of keys and values are reduce-scattered to the ranks that hold
them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from threefold.comm.axis import Axis
from threefold.comm.compiled import all_gather_equal, reduce_scatter
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.parallel.context.sequence import SequenceCut, ShardingContext, chunk_length
from threefold.random.positions import Slice


@dataclass(frozen=True)
class SequenceChunk:
    """One of `count` equal chunks of a dim, as `Positions` of it."""

    number: int
    count: int

    def indices(self, size: int, device: torch.device) -> Tensor:
        return torch.arange(self.number * size, (self.number + 1) * size, device=device)

    def whole(self, size: int) -> int:
        return size * self.count


class ContextParallelAttention(nn.Module):
    """`CausalAttention` of this rank's queries to the keys of all ranks of the context axis.

    Args:
        core: the attention of the whole sequence.
        axis: the context axis, of at least two ranks.
        heads: which of the model's heads this rank has.
    """

    def __init__(self, core: CausalAttention, axis: Axis, heads: Slice) -> None:
        super().__init__()
        self.axis = axis
        self.numbers = SequenceCut(axis.size, axis.index).chunks
        self.chunks = nn.ModuleList(
            _of_chunk(core, heads, SequenceChunk(number, 2 * axis.size)) for number in self.numbers
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """`q` [B, S / cp, heads, d] of this rank's two chunks, one after the other → [B, S / cp, heads · d].

        Args:
            k, v: [B, S / cp, key-value heads, d], of the same.
            samples: dropout keys, and the documents of the whole sequence.

        Raises:
            ValueError: the two chunks are not of one length.
        """
        size = chunk_length(q.shape[1])
        k, v = gather_sequence(torch.stack([k, v]), self.axis, dim=2).unbind()
        out = []
        for number, attend, queries in zip(self.numbers, self.chunks, q.split(size, 1), strict=True):
            end = (number + 1) * size
            out.append(attend(queries, k[:, :end], v[:, :end], samples))
        return torch.cat(out, 1)


def _of_chunk(core: CausalAttention, heads: Slice, queries: SequenceChunk) -> CausalAttention:
    """`core` for some queries, with the dropout masks of the whole."""
    attention = CausalAttention(window=core.window)
    # Of the weights [B, heads, queries, keys]; the keys are taken from the first on, so all of their dim is at hand.
    attention.dropout = core.dropout.of_part({1: heads, 2: queries})
    return attention


def gather_sequence(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The ranks' chunks along `dim`, joined in the order of the sequence.

    Backward sums the gradients over the ranks and gives each rank those of its own chunks: the adjoint, as each rank
    uses the result for queries of its own.
    """
    return _GatherSequence.apply(x, axis, dim)


def whole_sequence(x: Tensor, context: ShardingContext) -> Tensor:
    """The whole sequence along dim 1, gathered from the ranks; not differentiable."""
    if context.sequence_parallel:
        x = all_gather_equal(x, context.tp, 1)
    if context.cp.size > 1:
        x = _take_chunks(all_gather_equal(x, context.cp, 1), 1, _places(context.cp.size))
    return x


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim  # type: ignore[attr-defined]
        return _take_chunks(all_gather_equal(x, axis, dim), dim, _places(axis.size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        by_rank = _take_chunks(grad, ctx.dim, _held(ctx.axis.size))
        return reduce_scatter(by_rank, ctx.axis, ctx.dim), None, None


def _held(cp: int) -> list[int]:
    """Numbers of the chunks that the ranks hold, rank after rank."""
    return [number for index in range(cp) for number in SequenceCut(cp, index).chunks]


def _places(cp: int) -> list[int]:
    """The index of each chunk of the sequence in `_held`."""
    held = _held(cp)
    return [held.index(number) for number in range(2 * cp)]


def _take_chunks(x: Tensor, dim: int, numbers: list[int]) -> Tensor:
    """`x` with its equal chunks along `dim` in the order `numbers`."""
    chunks = x.chunk(len(numbers), dim)
    return torch.cat([chunks[number] for number in numbers], dim)
