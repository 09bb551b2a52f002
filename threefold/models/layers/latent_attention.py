"""Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values from one narrow latent per token.

All heads share the part of the keys that rotates (decoupled RoPE), so that the KV cache keeps the latent and this part
alone, whatever the number of heads.
"""

from typing import Final

import torch
from torch import Tensor, nn

from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import NOTHING, Linear, SampleInfo
from threefold.models.layers.latent_config import LatentConfig
from threefold.models.layers.rope_scaling import rope_scaling
from threefold.ops.attention import masked_attention

_EPS: Final = 1e-6  # of the norms of latents in all published models, whatever that of the others


class SharedByHeads(nn.Module):
    """Identity on latents [B, S, n] from which all heads compute keys and values.

    Over several ranks, it gives each rank the latents of the positions that its queries attend to, and its backward
    pass sums the gradients of the ranks' heads.
    """

    def forward(self, latents: Tensor) -> Tensor:
        return latents


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values, and whose queries with `query_rank`, come from normalized latents.

    The rows of `q` are grouped by head, its plain part before its rotary part, and so are those of `kv`, keys before
    values.
    """

    def __init__(self, config: LatentConfig, layer: int, name: str) -> None:
        super().__init__()
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.key_value_rank
        plain, rope, value = config.plain_head_dim, config.rope_head_dim, config.value_head_dim
        self.of_latents, self.of_queries, self.of_keys = (rank, rope), (plain, rope), (plain, value)  # widths of parts
        narrow = config.query_rank
        self.q_down = Linear(hidden, narrow, bias=False) if narrow else nn.Identity()
        self.q_norm = nn.RMSNorm(narrow, _EPS) if narrow else nn.Identity()
        self.q = Linear(narrow or hidden, heads * (plain + rope), bias=False)
        self.rotary = Rotary(rope, config.rope_theta, rope_scaling(config))
        self.kv_down = Linear(hidden, rank + rope, bias=False)
        self.kv_norm = nn.RMSNorm(rank, _EPS)
        self.key_rotary = Rotary(rope, config.rope_theta, rope_scaling(config))
        self.shared = SharedByHeads()
        self.kv = Linear(rank, heads * (plain + value), bias=False)
        scale = config.head_dim**-0.5 * config.score_factor
        self.core = CausalAttention(config.attention_dropout, config.window(layer), f"{name}.core", scale)
        self.proj = Linear(heads * value, hidden, bias=False)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        q, (k, v) = self.queries(x), self.keys_and_values(self.latents(x))
        return self.proj(self.core(q, k, v, samples))

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries [B, S, heads, plain + rotary]."""
        heads = self.q(self.q_norm(self.q_down(x))).unflatten(-1, (-1, sum(self.of_queries)))
        plain, turning = heads.split(self.of_queries, -1)
        (turned,) = self.rotary(turning)
        return torch.cat([plain, turned], -1)

    def latents(self, x: Tensor) -> Tensor:
        """Return the normalized latents and, after them, the rotated part of the keys: [B, S, rank + rotary]."""
        latent, turning = self.kv_down(x).split(self.of_latents, -1)
        (turned,) = self.key_rotary(turning.unsqueeze(2))
        return self.shared(torch.cat([self.kv_norm(latent), turned.squeeze(2)], -1))

    def keys_and_values(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys [B, S, heads, plain + rotary] and values [B, S, heads, value] from `latents`."""
        latent, turned = latents.split(self.of_latents, -1)
        plain, v = self.kv(latent).unflatten(-1, (-1, sum(self.of_keys))).split(self.of_keys, -1)
        return torch.cat([plain, turned.unsqueeze(2).expand(-1, -1, plain.shape[2], -1)], -1), v

    def absorbed(self, q: Tensor, latents: Tensor, hidden: Tensor) -> Tensor:
        """Attend from queries [B, Q, heads, plain + rotary] to latents [B, K, rank + rotary] → [B, Q, heads · value].

        The projection of latents to keys is applied to the queries instead, and that to values to the weighted sums of
        latents, so that no keys and values of all heads exist. `hidden` is bool [B, K]. Without dropout.
        """
        return self.kv.with_weight(lambda queries, weight: self._absorbed(queries, weight, latents, hidden), q)

    def _absorbed(self, q: Tensor, weight: Tensor, latents: Tensor, hidden: Tensor) -> Tensor:
        to_keys, to_values = weight.unflatten(0, (-1, sum(self.of_keys))).split(self.of_keys, 1)
        plain, turned = q.split(self.of_queries, -1)
        queries = torch.cat([_of_heads(plain, to_keys.mT), turned], -1)
        # The queries of all heads attend to one head of keys.
        one_head, keys, values = queries.flatten(1, 2), latents, latents[..., : self.of_latents[0]]
        one_head, keys, values, hidden = (each.unsqueeze(1) for each in (one_head, keys, values, hidden.unsqueeze(1)))
        sums = masked_attention(one_head, keys, values, hidden, self.core.scoring)
        return _of_heads(sums.reshape(*queries.shape[:3], -1), to_values).flatten(2)


def _of_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of `x` [B, S, heads, in] by its `weight` [heads, out, in]: [B, S, heads, out]."""
    if weight.stride(-1) == 1:  # bf16 products copy a right factor whose columns are in one piece
        return (weight @ x.flatten(0, 1).permute(1, 2, 0)).permute(2, 0, 1).unflatten(0, x.shape[:2])
    return (x.flatten(0, 1).transpose(0, 1) @ weight.mT).transpose(0, 1).unflatten(0, x.shape[:2])
