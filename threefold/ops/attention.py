"""Causal attention of the last positions of a sequence, optionally within a sliding window and within documents.

Without either, torch's kernels or plain products compute it (`ops.kernels`); otherwise `ops.tiles`.
"""

from typing import Final

from torch import Tensor

from threefold.ops.kernels import AttentionMask, causal_attention, plain_attention_serves
from threefold.ops.tiles import tiled_attention, varlen_attention, varlen_lengths, varlen_serves

ALL_BEFORE: Final = AttentionMask()
"""The causal mask alone."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask = ALL_BEFORE) -> Tensor:
    """Attend from the last Q of K positions to the visible ones up to their own: [B, Q, heads · d].

    Args:
        q: [B, Q, heads, d].
        k, v: [B, K, key-value heads, d], K ≥ Q; each key-value head serves a group of neighboring heads of `q` (GQA).
        mask: attention mask; of its documents, those of the first K positions count.
    """
    # The first queries of a window see everything before them; they are computed like the others, unless they are
    # alone.
    whole, windowed, mask = q.shape[1] == k.shape[1], mask.window > 0, mask.within(k.shape[1])
    if mask.hides_nothing and (whole or (not windowed and (q.is_cuda or plain_attention_serves(k)))):
        return causal_attention(q, k, v)
    if varlen_serves(q) and (lengths := varlen_lengths(q, k, mask)) is not None:
        return varlen_attention(q, k, v, lengths)
    return tiled_attention(q, k, v, mask)
