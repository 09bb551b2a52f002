"""Attention with dropout of its weights, tile by tile: the backward pass draws the masks again, and computes again."""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.ops.operators import define
from threefold.ops.plain_tile import plain_tile, plain_tile_gradients
from threefold.ops.tile_inputs import TileGradients, TileInputs, gradient_shapes, tile_inputs
from threefold.ops.tiles import Sight
from threefold.random.dropout import Dropout, drop_rows
from threefold.random.positions import ALL, row_major


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, sight: Sight, dropout: Dropout, keys: Tensor) -> Tensor:
    """`ops.attention.attention` whose weights have dropout.

    Args:
        q, k, v, sight: as there.
        dropout: of the weights [B, heads, Q, K], all keys of which are at hand.
        keys: int64 [B], the samples' keys.

    Returns:
        [B, Q, heads · d].
    """
    rows = row_major((q.shape[2], q.shape[1]), [dropout.parts.get(dim, ALL) for dim in (1, 2)], q.device)
    site = torch.as_tensor(dropout.site)
    sight = sight.within(k.shape[1])
    out: Tensor = _DroppedAttention.apply(q, k, v, sight.documents, sight.window, keys, rows, site, dropout.p)
    return out


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int,
        keys: Tensor,
        rows: Tensor,
        site: Tensor,
        p: float,
    ) -> Tensor:
        out = DROPPED_ATTENTION(q, k, v, documents, window, keys, rows, site, p)
        ctx.save_for_backward(q, k, v, out, documents, keys, rows, site)
        ctx.window, ctx.p = window, p
        flat: Tensor = out.flatten(2)
        return flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, documents, *drawn = ctx.saved_tensors
        found = DROPPED_ATTENTION_BACKWARD(grad.reshape(q.shape), q, k, v, out, documents, ctx.window, *drawn, ctx.p)
        return *found, *(None,) * 6


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int,
    keys: Tensor,
    rows: Tensor,
    site: Tensor,
    p: float,
) -> Tensor:
    """[B, Q, heads, d].

    Args:
        q, k, v, documents, window: as of `ops.attention`.
        keys: int64 [B], the samples' keys.
        rows: int64 [heads · Q], which rows of the whole attention matrix of a sample these are.
        site: int64, the stream of the dropout.
        p: probability of dropping a weight.
    """
    out = q.new_empty(q.shape)
    for part in tile_inputs(q, k, v, Sight(window, documents), None):
        drop = partial(_drop, part, keys, rows.view(q.shape[2], q.shape[1]), site, p)
        out[part.at_queries] = plain_tile(part.q, part.k, part.v, part.bias, drop).transpose(1, 2)
    return out


def _forward_shapes(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    documents: Tensor | None,
    window: int,
    keys: Tensor,
    rows: Tensor,
    site: Tensor,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v`."""
    gradients = TileGradients(q, k, v)
    for part in tile_inputs(q, k, v, Sight(window, documents), None):
        drop = partial(_drop, part, keys, rows.view(q.shape[2], q.shape[1]), site, p)
        upper, below = part.of_queries(grad), part.of_queries(out)
        gradients.add(part, plain_tile_gradients(upper, part.q, part.k, part.v, below, part.bias, drop))
    return gradients.whole()


def _backward_shapes(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return gradient_shapes(q, k, v)


def _drop(part: TileInputs, keys: Tensor, rows: Tensor, site: Tensor, p: float, weights: Tensor) -> Tensor:
    """Dropout of a tile's weights [b, heads, queries, keys]; `rows` is [heads, Q]."""
    samples, queries = part.at_queries
    columns = torch.arange(part.tile.keys.start, part.tile.keys.stop, device=weights.device)
    return drop_rows(weights, keys[samples], site, p, rows[:, queries], columns)


DROPPED_ATTENTION: Final = define("dropped_attention", _forward, _forward_shapes)
DROPPED_ATTENTION_BACKWARD: Final = define("dropped_attention_backward", _backward, _backward_shapes)
