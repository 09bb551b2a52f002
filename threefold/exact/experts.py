"""Experts of exact runs: products of each expert's rows of one sample, and the weighted sum of a token's outputs.

A micro-batch of an exact run is one sample. Its rows of an expert are in the order of its tokens, and they have a
product of their own, whichever rank computes it alongside those of other samples. So an expert's gradient for a sample
has the same bits in every layout; gradients for samples that arrive from several ranks at once are passed on
separately.

Only a run knows how many rows an expert gets. They are filled up with zeros to one of a few numbers (`computed_rows`),
so that the products of a run have few shapes, each of which is tried once (`exact.products`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.exact.layers import last_dim_summed, widened
from threefold.exact.products import equal_parts, product, tree_sum
from threefold.ops.kernels import GradientStore, gradient_store
from threefold.torch_private.runtime import UninterceptedFunction

_ROWS = 16  # least number of rows of a product, and least step from one number to the next
AddGradient = Callable[[Tensor], None]  # function that adds a weight's gradients from all senders, [senders, …]


def grouped_linear(
    x: Tensor, weight: Tensor, counts: list[int], inner: int = 1, outer: int = 1, add: AddGradient | None = None
) -> Tensor:
    """Apply a linear layer of `weight` [experts, out, in] to each group of rows of `x` [n, in]: [n, out].

    The groups are sorted by sender (a rank with its own sample), then expert; `counts` has the rows of each. `inner`
    and `outer` are those of `layers.linear`. If there are several senders, `add` takes the weight's gradients, and
    autograd gives it none. Like `kernels.linear`, it defers the gradient of a `DeferrableWeight` whose store is open:
    that of all senders if there are several.
    """
    return _GroupedLinear.apply(x, weight, counts, inner, outer, add, gradient_store(weight))


def computed_rows(count: int) -> int:
    """Return the number of rows with which a product of `count` is computed: at most four in each power of two."""
    step = max(_ROWS, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


class _GroupedLinear(UninterceptedFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: list[int],
        inner: int,
        outer: int,
        add: AddGradient | None,
        store: GradientStore | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaf, ctx.counts, ctx.inner, ctx.outer, ctx.add, ctx.store = weight, counts, inner, outer, add, store
        return _of_groups(x, weight, counts, inner, outer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if wants_x:
            grad_x = _of_groups(grad, weight.mT, ctx.counts, ctx.outer, ctx.inner)
        if wants_weight:
            of_senders = partial(_of_senders, x, grad, ctx.counts, len(weight), ctx.outer, ctx.inner)
            if ctx.store is not None:
                ctx.store.defer(ctx.leaf, of_senders)
            elif ctx.add is not None:
                ctx.add(of_senders())
            else:
                grad_weight = of_senders()
        return grad_x, grad_weight, None, None, None, None, None


def _of_groups(x: Tensor, weight: Tensor, counts: list[int], pieces: int, columns: int) -> Tensor:
    found = (
        product(rows, weight[number % len(weight)], pieces, columns=columns)
        for number, rows in enumerate(_filled(x, counts))
    )
    return torch.cat([out[:count] for out, count in zip(found, counts, strict=True)])


def _filled(x: Tensor, counts: list[int]) -> Iterator[Tensor]:
    """Yield each group of rows of `x`, with zeros behind."""
    for rows in x.split(counts):
        filled = x.new_zeros(computed_rows(len(rows)), x.shape[1])
        filled[: len(rows)] = rows
        yield filled


def _of_senders(x: Tensor, grad: Tensor, counts: list[int], experts: int, outer: int, inner: int) -> Tensor:
    """Return the weight's gradient from the only sender, or the gradients from all, [senders, …]."""
    groups = zip(_filled(x, counts), _filled(grad, counts), strict=True)
    cuts = 1, equal_parts(outer), inner
    found = torch.stack([product(upper.t(), rows.t(), *cuts) for rows, upper in groups])
    return found if len(found) == experts else found.unflatten(0, (-1, experts))


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Sum `x` [..., k, n] over k, weighted by `weights` [..., k], in a tree and in fp32 at least: [..., n]."""
    return _WeightedSum.apply(x, weights)


class _WeightedSum(UninterceptedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        parts = zip(x.unbind(-2), weights.unsqueeze(-1).unbind(-2), strict=True)
        return tree_sum(widened(part) * widened(weight) for part, weight in parts).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        upper = widened(grad).unsqueeze(-2)
        along = last_dim_summed(widened(x) * upper).squeeze(-1)
        return (upper * widened(weights).unsqueeze(-1)).to(x.dtype), along.to(weights.dtype)
