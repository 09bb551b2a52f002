"""Cross-entropy of logits whose columns, the vocabulary, are split over a mesh axis.

A rank computes its own columns of the logits (`ops.cross_entropy`); a maximum and two sums per token are all-reduced,
once for all chunks of columns.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from threefold.comm.axis import Axis
from threefold.comm.differentiable import all_reduce, all_reduce_max, reduce_from
from threefold.comm.layout import shard_bounds
from threefold.constants import IGNORE_INDEX, LOGITS_AT_ONCE
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.ops.cross_entropy import check_labels, logit_sums, scaled_exponentials


class ParallelCrossEntropy(nn.Module):
    """`F.cross_entropy(..., reduction="none")` on vocabulary shards.

    Args:
        vocab_size: whole size V of the vocabulary; need not be divisible by the axis.
        axis: mesh axis that the vocabulary is split over.
        logits_at_once: number of logits that it goes over at once on a CPU; changes no result.
        arithmetic: how the sums over the vocabulary are added.

    Example:
        >>> head = threefold.ColumnParallelLinear(512, 50257, mesh.tp, gather_output=False)
        >>> loss = threefold.ParallelCrossEntropy(50257, mesh.tp)(head(x), labels).mean()
    """

    def __init__(
        self, vocab_size: int, axis: Axis, logits_at_once: int = LOGITS_AT_ONCE, arithmetic: LayerArithmetic = PLAIN
    ) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.axis, self.vocab_size, self.logits_at_once = axis, vocab_size, logits_at_once
        self.start, self.end = shard_bounds(vocab_size, axis.size, axis.index)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token.

        Args:
            logits: [..., end − start], this rank's part.
            labels: int64 [...], in the whole vocabulary; -100 for ignored labels.

        Returns:
            [...], zero for ignored labels, the same on every rank; in fp32, or fp64 for fp64 logits.

        Raises:
            RuntimeError: a label is neither in the vocabulary nor -100 (on a GPU as a device-side assertion).
        """
        check_labels(labels, self.vocab_size)
        shard = (self.start, self.axis, self.logits_at_once, self.arithmetic)
        flat = _SplitCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), *shard)
        return flat.view(labels.shape)

    # Torch's compiler would find that the logits of both passes are equal, and keep them.
    @torch.compiler.disable
    def chunked(
        self, x: Tensor, weight: Tensor, labels: Tensor, chunk: int, keep: bool = False, cap: float = 0.0
    ) -> Tensor:
        """Return the loss of each token for logits `x @ weight.T`, with `chunk` columns in memory at once.

        Args:
            x: [..., H], the same on every rank; its gradient is this rank's part of a sum over the axis (`copy_to` or
                `gather_shares` before this completes it).
            weight: [end − start, H], this rank's rows; there may be none.
            labels: labels, as for `forward`.
            chunk: columns of the logits, at least 1.
            keep: whether to keep the logits for the backward pass, which otherwise computes them again.
            cap: limit of the logits, each cap · tanh(logit / cap); 0 for none.

        Raises:
            RuntimeError: see `forward`.
        """
        check_labels(labels, self.vocab_size)
        flat = labels.flatten()
        column = flat - self.start
        top, total, target = logit_sums(x.flatten(0, -2), weight, column, chunk, self.logits_at_once, keep, cap)
        highest = self.axis.all_reduce_max_(top.clone())
        mine = (column >= 0) & (column < len(weight))
        parts = [total * (top - highest).exp(), (target - highest).masked_fill(~mine, 0)]
        whole, shifted = reduce_from(torch.stack(parts), self.axis)
        losses = whole.log() - shifted
        return losses.masked_fill(flat == IGNORE_INDEX, 0).view(labels.shape)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, axis: Axis, at_once: int, arithmetic: LayerArithmetic
    ) -> Tensor:
        ctx.at_once = at_once
        columns = logits.shape[-1]
        top, total = arithmetic.softmax_sums(logits, partial(all_reduce_max, axis=axis), at_once)
        column = labels - start
        mine = (column >= 0) & (column < columns)
        column = column.masked_fill(~mine, 0)
        target = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1) - top if columns else torch.zeros_like(top)
        sums = all_reduce(torch.stack([total, target.masked_fill(~mine, 0)]), axis)
        counted = labels != IGNORE_INDEX
        ctx.save_for_backward(logits, top, sums, column, mine, counted)
        return (sums[0].log() - sums[1]).masked_fill_(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, sums, column, mine, counted = ctx.saved_tensors
        if not logits.numel():
            return torch.zeros_like(logits), None, None, None, None, None
        scale = grad.masked_fill(~counted, 0)
        factor, added = scale / sums[0], -(scale * mine)
        return scaled_exponentials(logits, top, factor, column, added, ctx.at_once), None, None, None, None, None
