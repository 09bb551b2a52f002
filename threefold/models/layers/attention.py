"""Causal self-attention with its attention mask, and rotary positions."""

from typing import Final

import torch
from torch import Tensor, nn

from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.layers.rope_scaling import RopeScaling, frequencies
from threefold.ops.attention import attention
from threefold.ops.kernels import later, serve_heads
from threefold.ops.tiles import Sight
from threefold.random.dropout import Dropout, dropped_attention
from threefold.random.rng import ALL, Positions, Slice

_LONGEST_KEPT: Final = 512  # keys; up to it weights with dropout are kept, which takes less time than to draw again


class CausalAttention(nn.Module):
    """softmax(Q·Kᵀ/√d)·V under a causal attention mask, with GQA where there are fewer key-value heads than heads.

    Args:
        dropout: probability of dropping an attention weight.
        window: how many positions back, its own among them, a token attends to; 0 for all.
        name: of this layer in the whole model, which decides its dropout masks.
    """

    def __init__(self, dropout: float = 0.0, window: int = 0, name: str = "") -> None:
        super().__init__()
        self.dropout = Dropout(dropout, name and f"{name}.dropout")
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Attend from the last Q of K positions to those up to their own, in their own document where `samples` has
        documents.

        Args:
            q: [B, Q, heads, d].
            k, v: [B, K, key-value heads, d]; each key-value head serves a group of neighbouring heads of `q` (GQA).
            samples: dropout keys and documents.

        Returns:
            [B, Q, heads · d].
        """
        sight = Sight(self.window, None if samples.documents is None else samples.documents[:, : k.shape[1]])
        if samples.keys is None or not self.dropout.draws(samples.keys):
            return attention(q, k, v, sight)
        whole = self.dropout.parts.get(2, ALL).whole(q.shape[1])  # the length of the sequence, in every layout
        if whole > _LONGEST_KEPT or 0 < self.window < whole or sight.documents is not None:
            return dropped_attention(q, k, v, sight, self.dropout, samples.keys)
        k, v = (serve_heads(each, q.shape[2]) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [B, heads, S, d]
        mask = later(q.shape[2], k.shape[2], q.device)
        weights = (q * q.shape[-1] ** -0.5 @ k.mT).masked_fill(mask, -torch.inf).softmax(-1)
        return (self.dropout(weights, samples.keys) @ v).transpose(1, 2).flatten(2)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864): turns queries and keys by their position.

    Element i of a head's first half and element i of its second half are one pair, as in Hugging Face's Llama.

    Args:
        head_dim: d, even.
        theta: base of the angles; pair i of d/2 turns by position · theta^(−2i/d).
        scaling: how they are changed for long sequences.
        held: which positions the queries and keys cover; by default all, from the first on.
    """

    def __init__(
        self, head_dim: int, theta: float, scaling: RopeScaling | None = None, held: Positions | None = None
    ) -> None:
        super().__init__()
        self.held = held or Slice()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling or RopeScaling()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """`q`, `k` [B, S, heads, d], each turned; computed in fp32 at least."""
        # Exact angles of far positions need fp64; a table of them would be a buffer that every rank has to fill.
        size = q.shape[1]
        turns = frequencies(self.head_dim, self.theta, self.scaling, self.held.whole(size), q.device)
        angles = self.held.indices(size, q.device).double().unsqueeze(-1) * turns
        wide = torch.promote_types(q.dtype, torch.float32)
        factor = self.scaling.attention_factor
        cos, sin = ((each * factor).to(wide).unsqueeze(-2) for each in (angles.cos(), angles.sin()))  # [S, 1, d/2]
        return _turn(q, cos, sin), _turn(k, cos, sin)

    def of_positions(self, held: Positions) -> "Rotary":
        """The same, for queries and keys that cover other positions."""
        return Rotary(self.head_dim, self.theta, self.scaling, held)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, theta={self.theta:g}, scaling={self.scaling.method}"


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
