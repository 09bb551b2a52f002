"""Causal attention of the last positions of a sequence, optionally within a sliding window and within documents.

Without either, torch's kernels or plain products compute it (`ops.kernels`). On a GPU, torch's fused kernel for
sequences of different lengths takes windows, and documents that are each in one piece (`varlen_attention`). Everything
else, windows and documents on a CPU or in fp32, documents in several parts, and on a CPU the last queries of a long
sequence, is computed tile by tile (`cpu.tiles`), or without that room with a mask of all queries and keys; so is
everything with a soft cap or sinks, also on a GPU.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise, repeat
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from threefold.doors import hook
from threefold.ops.kernels import (
    PLAIN_SCORING,
    AttentionMask,
    Scoring,
    attention_weights,
    causal_attention,
    plain_attention_serves,
    serve_heads,
)
from threefold.ops.tiles import hidden_keys

_ALL_BEFORE: Final = AttentionMask()
_TILED: Final[Callable[[Tensor, Tensor, Tensor, AttentionMask, Scoring], Tensor] | None] = hook("tiled_attention")
dropped_attention: Final[Callable[..., Tensor] | None] = hook("dropped_attention")
"""Attention with dropout whose masks the backward pass draws again (`cpu.dropped_attention`); None without the room."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask = _ALL_BEFORE, scoring: Scoring = PLAIN_SCORING
) -> Tensor:
    """Attend from the last Q of K positions to the visible ones up to their own: [B, Q, heads · d].

    `q` is [B, Q, heads, d]; `k` and `v` [B, K, key-value heads, d], each head for a group of neighboring heads of `q`
    (GQA). Values, and so the output, may have heads of another width. Of the mask's documents, those of the first K
    positions count.
    """
    # The first queries of a window see everything before them; they are computed like the others, unless they are
    # alone.
    whole, windowed, mask = q.shape[1] == k.shape[1], mask.window > 0, mask.within(k.shape[1])
    hides = mask.window > 0 or mask.documents is not None
    plain = q.is_cuda or plain_attention_serves(k)
    # Torch's fused kernel of a CPU takes one width only; without it, the attention matrix would exist.
    fused = whole and (_TILED is None or q.shape[-1] == v.shape[-1])
    if scoring.is_fused:
        if not hides and (fused or (plain and (whole or not windowed))):
            return causal_attention(q, k, v, scoring.scale)
        if varlen_serves(q) and v.shape[-1] <= q.shape[-1] and (lengths := varlen_lengths(q, k, mask)) is not None:
            return varlen_attention(q, k, v, lengths, scoring.scale)
    if _TILED is not None:
        return _TILED(q, k, v, mask, scoring)
    hidden = hidden_keys(len(q), q.shape[1], k.shape[1], mask, q.device)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return masked_attention(q, k, v, hidden, scoring).transpose(1, 2).flatten(2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scoring: Scoring = PLAIN_SCORING) -> Tensor:
    """Attend to the keys that are not `hidden` [B or 1, 1, Q, K]: [B, heads, Q, d].

    `q` is [B, heads, Q, d]; `k` and `v` are [B, key-value heads, K, d].
    """
    if scoring.is_fused and q.shape[-1] == v.shape[-1]:  # torch's unfused products, for other widths, are slower
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=scoring.scale, enable_gqa=grouped)
    k, v = (serve_heads(each, q.shape[1], 1) for each in (k, v))
    return attention_weights(q, k, hidden, scoring) @ v


class Lengths(NamedTuple):
    """Documents of all samples, concatenated: int32 [documents + 1] offsets of queries and keys, and the longest."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    window: int


def varlen_serves(q: Tensor) -> bool:
    """Return whether the kernel takes queries [B, Q, heads, d]: 16-bit floats on a GPU since Ampere, but not fp32."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > 256 or q.shape[-1] % 8:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


@torch.compiler.disable  # compiled code would be recompiled for the documents of every batch
def varlen_lengths(q: Tensor, k: Tensor, mask: AttentionMask) -> Lengths | None:
    """Return the documents of the last Q of K positions, on the device of `q`; None if one is in several parts."""
    keys = k.shape[1]
    ends_q, ends_k, most_q, most_k = [0], [0], 0, 0
    for bounds in document_bounds(len(q), keys, mask.documents):
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
    return Lengths(of_queries, of_keys, most_q, most_k, mask.window)


def document_bounds(rows: int, keys: int, documents: Tensor | None) -> Iterator[list[int] | None]:
    """Yield the starts of the documents among each sample's first `keys` positions, and `keys`; None for mixed ones."""
    if documents is None:
        yield from repeat([0, keys], rows)
        return
    for ids in documents[:rows, :keys].numpy(force=True):
        starts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist()]
        yield [*starts, keys] if len(np.unique(ids[starts])) == len(starts) else None


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float | None = None) -> Tensor:
    """Compute `attention` for queries that `varlen_serves`: [B, Q, heads · d]."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler

    width, narrower = v.shape[-1], q.shape[-1] - v.shape[-1]
    if narrower:  # the kernel takes values as wide as keys
        v = F.pad(v, (0, narrower))
    out = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        scale=scale,
        window_size=(lengths.window - 1, 0),  # keys before and after the query's own; −1 for all
        enable_gqa=q.shape[2] != k.shape[2],
    )
    assert isinstance(out, Tensor)  # a tuple is returned only on request
    return out.view(q.shape)[..., :width].flatten(2)
