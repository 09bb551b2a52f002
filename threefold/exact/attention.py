"""Causal attention of exact runs, whose bits depend neither on the heads that a rank holds nor on its threads.

It is computed in the tiles of `cpu.tiles`, whose bounds depend on the mask alone; the backward pass computes those of
long sequences again. The products are those of `exact.products`: torch's batches may have other bits for other
numbers of heads and threads.
"""

from collections.abc import Iterator
from itertools import product as pairs
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.cpu.dropped_attention import HeadDrop
from threefold.cpu.tiles import TileGradients, TileInputs, tile_inputs
from threefold.exact.layers import last_dim_summed
from threefold.exact.products import products, tree_sum
from threefold.ops.kernels import PLAIN_SCORING, AttentionMask, Scoring
from threefold.torch_private.runtime import UninterceptedFunction

_AT_ONCE: Final = 1 << 20  # attention weights of a run of samples or heads
_LONGEST_KEPT: Final = 512  # keys up to which the backward pass keeps the attention weights, as plain attention does


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: HeadDrop | None = None, scoring: Scoring = PLAIN_SCORING
) -> Tensor:
    """Compute `ops.attention.attention`, optionally with dropout of the attention weights: [B, Q, heads · d]."""
    mask = mask.within(k.shape[1])
    return _ExactAttention.apply(q, k, v, mask.documents, mask.window, drop, scoring.factor(q.shape[-1]))


class _ExactAttention(UninterceptedFunction):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int,
        drop: HeadDrop | None,
        scale: float,
    ) -> Tensor:
        out, kept, keeps = q.new_empty(q.shape), [], k.shape[1] <= _LONGEST_KEPT
        for part in tile_inputs(q * scale, k, v, AttentionMask(window, documents), None):
            into = part.of_queries(out)
            for rows, heads, groups in _runs(part):
                weights = _weights(part, rows, heads, groups)
                if keeps:
                    kept.append(weights)
                if drop is not None:
                    weights = drop(part, weights, rows, heads)
                into[rows, heads] = _served(weights, part.v[rows, groups].flatten(0, 1).mT)
        ctx.save_for_backward(q, k, v, out, documents, *kept)
        ctx.window, ctx.drop, ctx.scale = window, drop, scale
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, documents, *weights = ctx.saved_tensors
        gradients, kept = TileGradients(q, k, v), iter(weights)
        upper = grad.reshape(q.shape).contiguous()
        # The weights times their gradient, summed over a query's keys, are its output times the output's gradient.
        along = last_dim_summed(upper * out)
        for part in tile_inputs(q * ctx.scale, k, v, AttentionMask(ctx.window, documents), None):
            found = _tile_gradients(part, part.of_queries(upper), part.of_queries(along), ctx.drop, kept)
            found[0].mul_(ctx.scale)
            gradients.add(part, found)
        return *gradients.whole(), None, None, None, None


def _tile_gradients(
    part: TileInputs, upper: Tensor, along: Tensor, drop: HeadDrop | None, kept: Iterator[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of scaled queries, keys and values, of one tile with scaled queries.

    `upper` is the gradient of the tile's output [b, heads, Q, d], `along` that times the output, summed over d: [b,
    heads, Q, 1]. `kept` has the attention weights of the forward pass, run by run; those that it lacks are computed
    again.
    """
    to_q, to_k, to_v = torch.empty_like(part.q), torch.empty_like(part.k), torch.empty_like(part.v)
    for rows, heads, groups in _runs(part):
        given = next(kept, None)
        weights = _weights(part, rows, heads, groups) if given is None else given
        dropped = weights if drop is None else drop(part, weights, rows, heads)
        grad, queries, keys, values = (
            each.flatten(0, 1)
            for each in (upper[rows, heads], part.q[rows, heads], part.k[rows, groups], part.v[rows, groups])
        )
        to_v[rows, groups] = _of_groups(products(dropped.flatten(0, 1).mT, grad.mT), to_v[rows, groups])
        of_scores = _served(grad.view(*weights.shape[:3], -1), values)
        if drop is not None:
            of_scores = drop(part, of_scores, rows, heads)
        of_scores = of_scores.sub_(along[rows, heads]).mul_(weights)
        to_q[rows, heads] = _served(of_scores, keys.mT)
        to_k[rows, groups] = _of_groups(products(of_scores.flatten(0, 1).mT, queries.mT), to_k[rows, groups])
    return to_q, to_k, to_v


def _runs(part: TileInputs) -> Iterator[tuple[slice, slice, slice]]:
    """Yield runs with few attention weights: (samples of the tile, heads, key-value heads)."""
    samples, groups = part.k.shape[:2]
    served = part.q.shape[1] // groups
    of_group = max(1, served * part.q.shape[2] * part.k.shape[2])
    some_groups = min(groups, max(1, _AT_ONCE // of_group))
    some_samples = max(1, _AT_ONCE // (of_group * groups))
    for row, first in pairs(range(0, samples, some_samples), range(0, groups, some_groups)):
        end = min(first + some_groups, groups)
        yield slice(row, row + some_samples), slice(first * served, end * served), slice(first, end)


def _served(a: Tensor, b: Tensor) -> Tensor:
    """Multiply `a` [b, heads, Q, k] by the matrix of each head's group, `b` [b · groups, n, k]: [b, heads, Q, n]."""
    return products(a.reshape(len(b), -1, a.shape[3]), b).view(*a.shape[:3], -1)


def _of_groups(gradients: Tensor, like: Tensor) -> Tensor:
    """Sum gradients [b · heads, K, d] of keys or values over the heads of each group: [b, groups, K, d], as `like`."""
    of_groups = gradients.unflatten(0, (like.shape[0] * like.shape[1], -1))
    return tree_sum(of_groups.unbind(1)).view(like.shape)


def _weights(part: TileInputs, rows: slice, heads: slice, groups: slice) -> Tensor:
    """Return the attention weights [b, heads, Q, K] of some samples and heads of the tile."""
    scores = _served(part.q[rows, heads], part.k[rows, groups].flatten(0, 1))
    if part.bias is not None:
        scores += part.bias
    return scores.softmax(-1)
