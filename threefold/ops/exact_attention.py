"""Causal attention of exact runs, whose bits depend neither on the heads that a rank holds nor on its threads.

It is computed in the tiles of `ops.tiles`, whose bounds depend on the mask alone, and recomputed in the backward pass.
The products of each head are products of `ops.exact`: a batch of them, as in torch's kernels, has other bits for other
numbers of heads and threads.
"""

from collections.abc import Callable, Iterator
from itertools import product as pairs
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.ops.exact import last_dim_summed, products, tree_sum
from threefold.ops.kernels import AttentionMask
from threefold.ops.tiles import TileGradients, TileInputs, tile_inputs

HeadDrop: TypeAlias = Callable[[TileInputs, Tensor, int, slice], Tensor]
"""Dropout of a tile's attention weights [heads, Q, K], or of their gradient: (tile, weights, sample of the tile, heads)
→ weights; drops the same elements on each call."""

_AT_ONCE: Final = 1 << 18  # attention weights of a run of heads: fewer leave no work for two threads
_LONGEST_KEPT: Final = 512  # keys up to which the backward pass keeps the attention weights, as plain attention does


def exact_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: HeadDrop | None = None) -> Tensor:
    """Compute `ops.attention.attention`, also with dropout of the attention weights: [B, Q, heads · d].

    Args:
        q: [B, Q, heads, d].
        k, v: [B, K, key-value heads, d], K ≥ Q; each key-value head serves a group of neighboring heads of `q` (GQA).
        mask: attention mask; of its documents, those of the first K positions count.
        drop: dropout of the attention weights.
    """
    mask = mask.within(k.shape[1])
    out: Tensor = _ExactAttention.apply(q, k, v, mask.documents, mask.window, drop)
    return out


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int, drop: HeadDrop | None
    ) -> Tensor:
        out, kept, keeps = q.new_empty(q.shape), [], k.shape[1] <= _LONGEST_KEPT
        for part in _tiles(q, k, v, AttentionMask(window, documents)):
            into = part.of_queries(out)
            for row, heads, groups in _runs(part):
                weights = _weights(part, row, heads, groups)
                if keeps:
                    kept.append(weights)
                if drop is not None:
                    weights = drop(part, weights, row, heads)
                found = products(weights.unbind(), _serve(part.v[row, groups].mT, len(weights)))
                into[row, heads] = _stacked(found)
        ctx.save_for_backward(q, k, v, out, documents, *kept)
        ctx.window, ctx.drop = window, drop
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, documents, *weights = ctx.saved_tensors
        gradients, kept = TileGradients(q, k, v), iter(weights)
        upper = _by_head(grad.reshape(q.shape))
        # The weights times their gradient, summed over a query's keys, are its output times the output's gradient.
        along = last_dim_summed(upper.transpose(1, 2) * _by_head(out).transpose(1, 2)).transpose(1, 2)
        for part in _tiles(q, k, v, AttentionMask(ctx.window, documents)):
            gradients.add(part, _tile_gradients(part, part.of_queries(upper), part.of_queries(along), ctx.drop, kept))
        return *gradients.whole(), None, None, None


def _tiles(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Iterator[TileInputs]:
    """Yield the tiles, with scaled queries."""
    return tile_inputs(_by_head(q * q.shape[-1] ** -0.5), _by_head(k), _by_head(v), mask, None)


def _by_head(x: Tensor) -> Tensor:
    """Return `x` [B, S, heads, d] with the positions of a head side by side in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _tile_gradients(
    part: TileInputs, upper: Tensor, along: Tensor, drop: HeadDrop | None, kept: Iterator[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries before scaling, and of keys and values, of one tile.

    Args:
        part: the tile, with scaled queries.
        upper: gradient of the tile's output [b, heads, Q, d].
        along: `upper` times the tile's output, summed over d: [b, heads, Q, 1].
        drop: dropout of the attention weights.
        kept: attention weights of the forward pass, run by run; those that it lacks are computed again.
    """
    scale = part.q.shape[-1] ** -0.5
    to_q, to_k, to_v = torch.empty_like(part.q), torch.empty_like(part.k), torch.empty_like(part.v)
    for row, heads, groups in _runs(part):
        given = next(kept, None)
        weights = _weights(part, row, heads, groups) if given is None else given
        count = len(weights)
        grad, queries = upper[row, heads], part.q[row, heads]
        dropped = weights if drop is None else drop(part, weights, row, heads)
        to_v[row, groups] = _of_groups(products(grad.mT.contiguous().unbind(), dropped.mT.unbind()), groups)
        of_scores = _stacked(products(grad.contiguous().unbind(), _serve(part.v[row, groups], count)))
        if drop is not None:
            of_scores = drop(part, of_scores, row, heads)
        of_scores = of_scores.sub_(along[row, heads]).mul_(weights)
        found = products(of_scores.unbind(), _serve(part.k[row, groups].mT, count))
        to_q[row, heads] = _stacked(found).mul_(scale)
        to_k[row, groups] = _of_groups(products(queries.mT.contiguous().unbind(), of_scores.mT.unbind()), groups)
    return to_q, to_k, to_v


def _stacked(matrices: list[Tensor]) -> Tensor:
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0].unsqueeze(0)


def _runs(part: TileInputs) -> Iterator[tuple[int, slice, slice]]:
    """Yield runs of groups of heads with few attention weights: (sample of the tile, heads, key-value heads)."""
    served = part.q.shape[1] // part.k.shape[1]
    size = max(1, _AT_ONCE // max(1, served * part.q.shape[2] * part.k.shape[2]))
    for row, first in pairs(range(len(part.q)), range(0, part.k.shape[1], size)):
        end = min(first + size, part.k.shape[1])
        yield row, slice(first * served, end * served), slice(first, end)


def _serve(x: Tensor, heads: int) -> list[Tensor]:
    """Return the matrices of key-value heads `x` [groups, …], each for every head of its group."""
    served = heads // len(x)
    return [each for each in x.unbind() for _ in range(served)]


def _of_groups(gradients: list[Tensor], groups: slice) -> Tensor:
    """Sum the gradients [d, K] of keys or values over the heads of each group: [groups, K, d]."""
    by_group = _stacked(gradients).unflatten(0, (groups.stop - groups.start, -1))
    return tree_sum(by_group.unbind(1)).mT


def _weights(part: TileInputs, row: int, heads: slice, groups: slice) -> Tensor:
    """Return the attention weights [heads, Q, K] of some heads of a sample of the tile."""
    of_heads = part.q[row, heads].contiguous().unbind()
    scores = _stacked(products(of_heads, _serve(part.k[row, groups], len(of_heads))))
    if part.bias is not None:
        scores += part.bias
    return scores.softmax(-1)
