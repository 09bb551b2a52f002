"""Attention whose weights are dropped, in masks that do not depend on the layout (`random.dropout`).

It is computed tile by tile, as `cpu.tiles` does, and the masks are drawn again in the backward pass, so that no mask of
the size of the attention matrix exists. Compiled code calls it as one operator.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.cpu import tiles
from threefold.random.dropout import Dropout, drop_rows
from threefold.random.rng import ALL, row_major
from threefold.torch_private.runtime import Handle, operator

HeadDrop: TypeAlias = Callable[[tiles.TileInputs, Tensor, slice, slice], Tensor]
"""Dropout of a tile's attention weights [b, heads, Q, K], or of their gradient: (tile, weights, samples of the tile,
heads) → weights; drops the same elements on each call."""


def dropped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: tiles.AttentionMask,
    dropout: Dropout,
    keys: Tensor,
    scoring: tiles.Scoring = tiles.PLAIN_SCORING,
) -> Tensor:
    """Compute `ops.attention.attention` with `dropout` of its weights [B, heads, Q, K], with all keys local."""
    mask = mask.within(k.shape[1])
    settings = mask.window, dropout.handle, scoring.scale, scoring.softcap
    return _DroppedAttention.apply(q, k, v, scoring.sinks, mask.documents, keys, *settings)


def head_drop(q: Tensor, keys: Tensor, dropout: Dropout) -> HeadDrop:
    """Return the dropout of attention weights of queries `q` [B, Q, heads, d]; arguments as for `dropped_attention`."""
    shape, parts = (q.shape[2], q.shape[1]), [dropout.parts.get(dim, ALL) for dim in (1, 2)]
    rows = row_major(shape, parts, q.device).view(shape)

    def of_heads(part: tiles.TileInputs, weights: Tensor, of_tile: slice, heads: slice) -> Tensor:
        samples, queries = part.at_queries
        columns = torch.arange(part.tile.keys.start, part.tile.keys.stop, device=q.device)
        return drop_rows(weights, keys[samples][of_tile], dropout.site, dropout.p, rows[heads, queries], columns)

    return of_heads


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        documents: Tensor | None,
        keys: Tensor,
        *settings: Any,
    ) -> Tensor:
        out = DROPPED_ATTENTION(q, k, v, sinks, documents, keys, *settings)
        ctx.save_for_backward(q, k, v, sinks, documents, keys)
        ctx.settings = settings
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, documents, keys = ctx.saved_tensors
        grad = grad.reshape(*q.shape[:-1], v.shape[-1])
        *found, of_sinks = DROPPED_ATTENTION_BACKWARD(grad, q, k, v, sinks, documents, keys, *ctx.settings)
        return *found, None if sinks is None else of_sinks.to(sinks.dtype), *[None] * 6


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    keys: Tensor,
    window: int,
    layer: Handle,
    scale: float | None,
    softcap: float,
) -> Tensor:
    scoring = tiles.Scoring(scale, softcap, sinks)
    out, drop = tiles.output_shape(q, k, v), head_drop(q, keys, layer.value)
    for part in tiles.tile_inputs(q, k, v, tiles.AttentionMask(window, documents), None):
        found = tiles.plain_tile(part.q, part.k, part.v, part.bias, scoring, _whole_drop(drop, part))
        out[part.at_queries] = found.transpose(1, 2)
    return out


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    keys: Tensor,
    window: int,
    layer: Handle,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scoring = tiles.Scoring(scale, softcap, sinks)
    gradients, drop = tiles.TileGradients(q, k, v, sinks), head_drop(q, keys, layer.value)
    for part in tiles.tile_inputs(q, k, v, tiles.AttentionMask(window, documents), None):
        upper, dropped = part.of_queries(grad), _whole_drop(drop, part)
        gradients.add(part, *tiles.plain_tile_gradients(upper, part.q, part.k, part.v, part.bias, scoring, dropped))
    return *gradients.whole(), gradients.of_sinks


def _whole_drop(drop: HeadDrop, part: tiles.TileInputs) -> tiles.Drop:
    return lambda weights: drop(part, weights, slice(None), slice(None))


DROPPED_ATTENTION: Final[Any] = operator("dropped_attention", tiles.output_shape)(_forward)
DROPPED_ATTENTION_BACKWARD: Final[Any] = operator("dropped_attention_backward", tiles.gradient_shapes)(_backward)
