"""Attention with dropout of its weights, tile by tile: the backward pass draws the masks again, and computes again."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.ops.plain_tile import Drop, plain_tile, plain_tile_gradients
from threefold.ops.tile_inputs import TileGradients, TileInputs, gradient_shapes, tile_inputs
from threefold.ops.tiles import Sight
from threefold.random.dropout import Dropout, drop_rows
from threefold.random.positions import ALL, row_major
from threefold.torch_private.operators import Handle, operator


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, sight: Sight, dropout: Dropout, keys: Tensor) -> Tensor:
    """`ops.attention.attention` whose weights have dropout.

    Args:
        q, k, v, sight: as there.
        dropout: of the weights [B, heads, Q, K], all keys of which are at hand.
        keys: int64 [B], the samples' keys.

    Returns:
        [B, Q, heads · d].
    """
    sight = sight.within(k.shape[1])
    out: Tensor = _DroppedAttention.apply(q, k, v, sight.documents, sight.window, keys, dropout.handle)
    return out


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int, keys: Tensor, layer: Handle
    ) -> Tensor:
        out = DROPPED_ATTENTION(q, k, v, documents, window, keys, layer)
        ctx.save_for_backward(q, k, v, documents, keys)
        ctx.window, ctx.layer = window, layer
        flat: Tensor = out.flatten(2)
        return flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, keys = ctx.saved_tensors
        grad = grad.reshape(q.shape)
        found = DROPPED_ATTENTION_BACKWARD(grad, q, k, v, documents, ctx.window, keys, ctx.layer)
        return *found, None, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int, keys: Tensor, layer: Handle
) -> Tensor:
    """[B, Q, heads, d]; `layer` is the `Dropout`."""
    out, drop_of = q.new_empty(q.shape), _drops(q, keys, layer.value)
    for part in tile_inputs(q, k, v, Sight(window, documents), None):
        out[part.at_queries] = plain_tile(part.q, part.k, part.v, part.bias, drop_of(part)).transpose(1, 2)
    return out


def _forward_shapes(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int,
    keys: Tensor,
    layer: Handle,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v`."""
    gradients, drop_of = TileGradients(q, k, v), _drops(q, keys, layer.value)
    for part in tile_inputs(q, k, v, Sight(window, documents), None):
        upper = part.of_queries(grad)
        gradients.add(part, plain_tile_gradients(upper, part.q, part.k, part.v, part.bias, drop_of(part)))
    return gradients.whole()


def _backward_shapes(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return gradient_shapes(q, k, v)


def _drops(q: Tensor, keys: Tensor, dropout: Dropout) -> Callable[[TileInputs], Drop]:
    """The dropout of each tile's weights."""
    shape = q.shape[2], q.shape[1]
    rows = row_major(shape, [dropout.parts.get(dim, ALL) for dim in (1, 2)], q.device).view(shape)

    def of_tile(part: TileInputs) -> Drop:
        samples, queries = part.at_queries
        columns = torch.arange(part.tile.keys.start, part.tile.keys.stop, device=q.device)
        drawn = keys[samples], dropout.site, dropout.p, rows[:, queries], columns
        return lambda weights: drop_rows(weights, *drawn)

    return of_tile


DROPPED_ATTENTION: Final[Any] = operator("dropped_attention", _forward_shapes)(_forward)
DROPPED_ATTENTION_BACKWARD: Final[Any] = operator("dropped_attention_backward", _backward_shapes)(_backward)
