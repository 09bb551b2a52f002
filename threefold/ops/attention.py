"""Causal attention of the last positions of a sequence, also within a sliding window and within documents.

If a window or documents hide keys, only the nonzero parts of the attention matrix are computed, tile by tile
(`ops.tiles`), and recomputed in the backward pass (FlashAttention, arXiv 2205.14135): neither the matrix nor a mask of
its size ever exists. On a GPU, torch's fused kernel for sequences of different lengths does the same
(`varlen_attention`). Compiled code calls all of it as one operator, because the tiles depend on the documents, which
differ from batch to batch.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from threefold.ops.kernels import causal_attention, plain_attention_serves
from threefold.ops.tiles import (
    ALL_BEFORE,
    Sight,
    TileGradients,
    TileInputs,
    document_bounds,
    gradient_shapes,
    plain_tile,
    plain_tile_gradients,
    tile_inputs,
    wide,
)
from threefold.torch_private.compilation import cpu_attention, cpu_attention_backward, operator

_LONGEST_PLAIN: Final = 512  # keys of a bf16 tile; above it, torch's fused kernel is faster than plain products


def attention(q: Tensor, k: Tensor, v: Tensor, sight: Sight = ALL_BEFORE) -> Tensor:
    """Attend from the last Q of K positions to the visible ones up to their own: [B, Q, heads · d].

    Args:
        q: [B, Q, heads, d].
        k, v: [B, K, key-value heads, d], K ≥ Q; each key-value head serves a group of neighboring heads of `q` (GQA).
        sight: attention mask; of its documents, those of the first K positions count.
    """
    # The first queries of a window see everything before them; they are computed like the others, unless they are
    # alone.
    whole, windowed, sight = q.shape[1] == k.shape[1], sight.window > 0, sight.within(k.shape[1])
    if sight.hides_nothing and (whole or (not windowed and (q.is_cuda or plain_attention_serves(k)))):
        return causal_attention(q, k, v)
    if varlen_serves(q) and (lengths := varlen_lengths(q, k, sight)) is not None:
        return varlen_attention(q, k, v, lengths)
    out: Tensor = _TiledAttention.apply(q, k, v, sight.documents, sight.window)
    return out


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int) -> Tensor:
        out, sums = TILED_ATTENTION(q, k, v, documents, window)
        ctx.save_for_backward(q, k, v, out, sums, documents)
        ctx.window = window
        flat: Tensor = out.flatten(2)
        return flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, documents = ctx.saved_tensors
        grad = grad.reshape(q.shape)
        found = TILED_ATTENTION_BACKWARD(grad, q, k, v, out, sums, documents, ctx.window)
        return *found, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int) -> tuple[Tensor, Tensor]:
    """Return the output [B, Q, heads, d], and the log-sum-exp of each query's scores [B, Q, heads].

    The log-sum-exp is filled only for tiles that the fused kernel computes.
    """
    out, sums = _forward_shapes(q, k, v, documents, window)
    for part in _inputs(q, k, v, Sight(window, documents)):
        if _is_fused(part):
            found, total = cpu_attention(part.q, part.k, part.v, part.bias, part.tile.is_causal)
            sums[part.at_queries] = total.transpose(1, 2)
        else:
            found = plain_tile(part.q, part.k, part.v, part.bias)
        out[part.at_queries] = found.transpose(1, 2)
    return out, sums


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=wide(q))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, documents: Tensor | None, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = TileGradients(q, k, v)
    for part in _inputs(q, k, v, Sight(window, documents)):
        upper = part.of_queries(grad)
        if _is_fused(part):
            below, total, causal = part.of_queries(out), part.of_queries(sums), part.tile.is_causal
            found = cpu_attention_backward(upper, part.q, part.k, part.v, below, total, part.bias, causal)
        else:
            found = plain_tile_gradients(upper, part.q, part.k, part.v, part.bias)
        gradients.add(part, found)
    return gradients.whole()


def _backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, documents: Tensor | None, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return gradient_shapes(q, k, v)


TILED_ATTENTION: Final[Any] = operator("tiled_attention", _forward_shapes)(_forward)
TILED_ATTENTION_BACKWARD: Final[Any] = operator("tiled_attention_backward", _backward_shapes)(_backward)


def _inputs(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Iterator[TileInputs]:
    return tile_inputs(q, k, v, sight, _shortest_fused(q))


def _shortest_fused(x: Tensor) -> int | None:
    """Return the fewest keys of a tile for torch's fused kernel; None on a GPU, where none takes tiles."""
    if x.device.type != "cpu":
        return None
    return _LONGEST_PLAIN + 1 if x.dtype == torch.bfloat16 else 0


def _is_fused(part: TileInputs) -> bool:
    shortest = _shortest_fused(part.q)
    return shortest is not None and len(part.tile.keys) >= shortest


_DTYPES: Final = (torch.bfloat16, torch.float16)
_WIDEST_HEAD: Final = 256
_HEAD_MULTIPLE: Final = 8
_CAPABILITY: Final = (8, 0)  # Ampere


class Lengths(NamedTuple):
    """Documents of all samples, concatenated.

    Attributes:
        queries, keys: int32 [documents + 1], offsets of the queries and keys of each document, and the end of the last.
        most_queries, most_keys: longest document, in queries and in keys.
        window: window of the `Sight`.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    window: int


def varlen_serves(q: Tensor) -> bool:
    """Return whether the kernel takes queries [B, Q, heads, d]: 16-bit floats on a GPU since Ampere, but not fp32."""
    if not q.is_cuda or q.dtype not in _DTYPES:
        return False
    fits = q.shape[-1] <= _WIDEST_HEAD and q.shape[-1] % _HEAD_MULTIPLE == 0
    return fits and torch.cuda.get_device_capability(q.device) >= _CAPABILITY


@torch.compiler.disable  # compiled code would be recompiled for the documents of every batch
def varlen_lengths(q: Tensor, k: Tensor, sight: Sight) -> Lengths | None:
    """Return the documents of the last Q of K positions, on the device of `q` [B, Q, heads, d].

    None if a document is in several pieces, which the kernel cannot express.
    """
    keys = k.shape[1]
    ends_q, ends_k, most_q, most_k = [0], [0], 0, 0
    for bounds in document_bounds(len(q), keys, sight.documents):
        if bounds is None:
            return None
        for begin, end in pairwise(bounds):
            count_q = max(0, end - max(begin, keys - q.shape[1]))
            ends_q.append(ends_q[-1] + count_q)
            ends_k.append(ends_k[-1] + end - begin)
            most_q, most_k = max(most_q, count_q), max(most_k, end - begin)
    # One copy for both, from pinned memory, which the host does not wait for.
    both = torch.tensor([ends_q, ends_k], dtype=torch.int32, pin_memory=q.is_cuda).to(q.device, non_blocking=True)
    of_queries, of_keys = both
    return Lengths(of_queries, of_keys, most_q, most_k, sight.window)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
    """Compute `attention` for queries that `varlen_serves`: [B, Q, heads · d]."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler

    out = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        window_size=(lengths.window - 1, 0),  # keys before and after the query's own; −1 for all
        enable_gqa=q.shape[2] != k.shape[2],
    )
    assert isinstance(out, Tensor)  # a tuple is returned only on request
    return out.view(*q.shape[:2], -1)
