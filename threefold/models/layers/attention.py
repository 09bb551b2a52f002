"""Causal self-attention with its attention mask, and rotary position embeddings."""

from typing import Final

import torch
from torch import Tensor, nn

from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.layers.rope_scaling import RopeScaling, cos_and_sin, frequencies
from threefold.ops.attention import attention, dropped_attention
from threefold.ops.kernels import AttentionMask, Scoring, attention_weights, later, serve_heads
from threefold.ops.tiles import hidden_keys
from threefold.random.dropout import Dropout
from threefold.random.rng import ALL, Positions, Slice

_LONGEST_KEPT: Final = 512  # keys; up to this length, keeping the dropped weights is faster than drawing again


class CausalAttention(nn.Module):
    """softmax(Q·Kᵀ/√d)·V under a causal attention mask, with GQA if there are fewer key-value heads than heads.

    A token attends to `window` positions, including its own (0: all). `name` in the whole model keys the dropout masks.
    A subclass with another `forward` and no weights, such as scores with a bias, trains in every layout but a ring's.

    Args:
        scale: factor of the scores; None for head_dim^-0.5.
        softcap: c of c · tanh(score / c), before the mask (Gemma 2, arXiv 2408.00118); 0 for none.
        sinks: number of heads, each of which has a trained score that joins the denominator of its softmax (gpt-oss,
            arXiv 2508.10925); 0 for none.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        dropout: float = 0.0,
        window: int = 0,
        name: str = "",
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: int = 0,
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout, name and f"{name}.dropout")
        self.window, self.scale, self.softcap = window, scale, softcap
        self.register_parameter("sinks", nn.Parameter(torch.zeros(sinks)) if sinks else None)

    @property
    def scoring(self) -> Scoring:
        """How scores become attention weights."""
        return Scoring(self.scale, self.softcap, self.sinks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Attend from the last Q of K positions to those up to their own, within documents if `samples` has any.

        `q` [B, Q, heads, d], `k` and `v` [B, K, key-value heads, d] → [B, Q, heads · d]; each key-value head serves a
        group of neighboring heads of `q` (GQA). Values, and so the output, may have heads of another width.
        """
        return self.attend(q, k, v, samples, self.scoring)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo, scoring: Scoring) -> Tensor:
        """Compute `forward` with a scoring of the caller's."""
        hidden = AttentionMask(self.window, None if samples.documents is None else samples.documents[:, : k.shape[1]])
        if samples.keys is None or not self.dropout.draws(samples.keys):
            return attention(q, k, v, hidden, scoring)
        whole = self.dropout.parts.get(2, ALL).whole(q.shape[1])  # length of the sequence, independent of the layout
        hides = 0 < self.window < whole or hidden.documents is not None
        if dropped_attention is not None and (whole > _LONGEST_KEPT or hides or not scoring.is_fused):
            return dropped_attention(q, k, v, hidden, self.dropout, samples.keys, scoring)
        k, v = (serve_heads(each, q.shape[2]) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [B, heads, S, d]
        sizes = q.shape[2], k.shape[2]
        mask = hidden_keys(len(q), *sizes, hidden, q.device) if hides else later(*sizes, q.device)
        weights = attention_weights(q, k, mask, scoring)
        return (self.dropout(weights, samples.keys) @ v).transpose(1, 2).flatten(2)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864): rotates queries and keys by their position.

    Element i of the first half and element i of the second half of a head's first `head_dim` features form a pair, as
    in Hugging Face's Llama; it rotates by position · theta^(−2i/d). Further features stay as they are. `held` are the
    positions that queries and keys cover; by default all.
    """

    def __init__(
        self, head_dim: int, theta: float, scaling: RopeScaling | None = None, held: Positions | None = None
    ) -> None:
        super().__init__()
        self.held = held or Slice()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling or RopeScaling()

    def forward(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Rotate queries, keys or both, [B, S, heads, d] each; computed in fp32 at least."""
        # Exact angles of far positions need fp64; a table of them would be a buffer that every rank has to fill.
        size, device = heads[0].shape[1], heads[0].device
        turns = frequencies(self.head_dim, self.theta, self.scaling, self.held.whole(size), device)
        wide = torch.promote_types(heads[0].dtype, torch.float32)
        cos, sin = cos_and_sin(self.held.indices(size, device), turns, self.scaling.attention_factor, wide)
        return tuple(_turn(each, cos, sin) for each in heads)

    def of_positions(self, held: Positions) -> "Rotary":
        """Return this layer for queries and keys that cover other positions."""
        return Rotary(self.head_dim, self.theta, self.scaling, held)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, theta={self.theta:g}, scaling={self.scaling.method}"


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, rest] if rest.shape[-1] else turned, -1).to(x.dtype)
