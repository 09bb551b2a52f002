"""Cross-entropy of a linear layer's output, some columns of the logits at a time.

What is kept for the backward pass is the input and one number per token, the largest logit: the backward pass computes
the logits again, chunk by chunk, as Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv
2411.09009), section 4. So the memory does not depend on how many micro-batches a pipeline has under way. (Liger Kernel,
Hsu et al., arXiv 2410.10989, goes over chunks of tokens and computes the gradients in the forward pass: one product
fewer, but each micro-batch under way holds a gradient as large as the weight.)

A chunk is a run of columns of the logits for all tokens, so the rows of the weight's gradient come each from one
product, rounded once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.labels import IGNORE_INDEX
from threefold.ops.kernels import product
from threefold.torch_private.tensors import assert_async


# Torch's compiler would find the logits of both passes to be the same, and keep them.
@torch.compiler.disable
def chunked_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight), labels, reduction="none")`, of whose logits `chunk` columns exist at once.

    Args:
        x: [..., H].
        weight: [V, H].
        labels: int64 [...], -100 to ignore a token.
        chunk: columns of the logits, at least 1.

    Returns:
        [...], zero for ignored labels; in fp32, or fp64 for fp64 inputs.
    """
    flat = labels.flatten()
    top, total, target = logit_sums(x.flatten(0, -2), weight, flat, chunk)
    losses = total.log() - (target - top)
    return losses.masked_fill(flat == IGNORE_INDEX, 0).view(labels.shape)


def logit_sums(x: Tensor, weight: Tensor, column: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of the logits `x @ weight.T`: the maximum, Σ exp(logit − maximum), and the logit at `column`.

    Args:
        x: [T, H].
        weight: [V, H], V may be 0.
        column: int64 [T]; where it is outside of [0, V) the logit is given as zero.
        chunk: columns of the logits that exist at once, at least 1.

    Returns:
        three tensors [T], in fp32 at least; the maximum is a constant to autograd.
    """
    out: tuple[Tensor, Tensor, Tensor] = _LogitSums.apply(x, weight, column, chunk)
    return out


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Check that each label is in the vocabulary or -100.

    Raises:
        RuntimeError: one is not (on a GPU as a device-side assertion).
    """
    known = (labels >= 0) & (labels < vocab_size) | (labels == IGNORE_INDEX)
    assert_async(known.all(), f"a label is neither in the vocabulary of {vocab_size} nor {IGNORE_INDEX}")


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
