"""The head's product and the cross-entropy together, some columns of the logits at a time.

What is kept for the backward pass is the input and one number per token, the largest logit: the backward pass computes
the logits again, chunk by chunk, as Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv
2411.09009), section 4. So the memory does not depend on how many micro-batches a pipeline has under way. (Liger Kernel,
Hsu et al., arXiv 2410.10989, goes over chunks of tokens and computes the gradients in the forward pass: one product
fewer, but each micro-batch under way holds a gradient as large as the weight.)

A chunk is a run of columns of the logits for all tokens, so the rows of the weight's gradient come each from one
product, rounded once; a rank that has a part of the vocabulary goes over its own columns, and what travels is a maximum
and two sums per token, once for all chunks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from threefold.comm.axis import Axis
from threefold.comm.collectives import reduce_from
from threefold.labels import IGNORED
from threefold.ops.kernels import product


# Torch's compiler would find the logits of both passes to be the same, and keep them.
@_disable_dynamo
def chunked_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, chunk: int, start: int = 0, axis: Axis | None = None
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight), labels, reduction="none")`, of whose logits `chunk` columns exist at once.

    Args:
        x: [..., H], the same on every rank of `axis`; its gradient is this rank's part of a sum over them (`copy_to`
            or `gather_shares` before this completes it).
        weight: [V, H], or this rank's rows of it, which may be none.
        labels: int64 [...], in the whole vocabulary, or -100 for tokens that do not count.
        chunk: columns of the logits, at least 1.
        start: the first of this rank's rows.
        axis: the ranks that the vocabulary is split over; None where `weight` is whole.

    Returns:
        [...], zero for tokens that do not count, the same on every rank; in fp32, or fp64 for fp64 inputs.
    """
    flat = labels.flatten()
    column = flat - start
    top, total, target = _LogitSums.apply(x.flatten(0, -2), weight, column, chunk)
    if axis is None:
        losses = total.log() - (target - top)
    else:
        highest = axis.all_reduce_max_(top.clone())
        mine = (column >= 0) & (column < len(weight))
        parts = [total * (top - highest).exp(), (target - highest).masked_fill(~mine, 0)]
        whole, shifted = reduce_from(torch.stack(parts), axis)
        losses = whole.log() - shifted
    return losses.masked_fill(flat == IGNORED, 0).view(labels.shape)


class _LogitSums(torch.autograd.Function):
    """Of each row of `x @ weight.T`: its maximum (a constant to autograd), Σ exp(logit − maximum), and the logit at
    `column`, zero where there is none; in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, column: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        top = x.new_full((len(x),), -torch.inf, dtype=wide)
        total, target = torch.zeros_like(top), torch.zeros_like(top)
        for first, rows in _chunks(weight, chunk):
            logits = product(x, rows).to(wide)
            place, there = _within(column - first, len(rows))
            target += logits.gather(1, place).squeeze(1).masked_fill_(~there, 0)
            higher = torch.maximum(top, logits.amax(1))
            total.mul_((top - higher).exp_()).add_(logits.sub_(higher.unsqueeze(1)).exp_().sum(1))
            top = higher
        ctx.save_for_backward(x, weight, column, top)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(top)
        return top, total, target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _top: Tensor, total: Tensor, target: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, column, top = ctx.saved_tensors
        grad_x = torch.zeros_like(x, dtype=total.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for first, rows in _chunks(weight, ctx.chunk):
            grad = product(x, rows).to(top.dtype).sub_(top.unsqueeze(1)).exp_().mul_(total.unsqueeze(1))
            place, there = _within(column - first, len(rows))
            grad = grad.scatter_add_(1, place, (target * there).unsqueeze(1)).to(x.dtype)
            if grad_x is not None:
                grad_x += product(grad, rows.t())
            if grad_weight is not None:
                grad_weight[first : first + len(rows)] = product(grad.t(), x.t())
        return None if grad_x is None else grad_x.to(x.dtype), grad_weight, None, None


def _chunks(weight: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """The rows of `weight` by `size`, each time with the number of the first."""
    for first in range(0, len(weight), size):
        yield first, weight[first : first + size]


def _within(column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Indices [T, 1] that are safe to look up, and which of them are meant [T]."""
    there = (column >= 0) & (column < columns)
    return column.masked_fill(~there, 0).unsqueeze(1), there
