"""Llama (Touvron et al., arXiv 2302.13971), and Mistral, Mixtral and Qwen, written for one device.

`sharding.py` beside this file declares how each weight is sharded over a mesh. Layers pass along `samples`, which hold
a 64-bit number per sample that keys the dropout masks, and the documents that the attention mask separates. Each module
with dropout gets its name in the model, which also keys its masks.
"""

from typing import ClassVar

from torch import Tensor, nn

from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import NOTHING, Decoder, Embedding, Head, Linear, SampleInfo
from threefold.models.layers.experts import MixtureOfExperts, SwiGLU
from threefold.models.layers.rope_scaling import rope_scaling
from threefold.models.llama import LlamaConfig
from threefold.random.dropout import Dropout


class Input(nn.Module):
    """Token embeddings."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout, "embed.dropout")

    def forward(self, tokens: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """int64 [B, S] → [B, S, H]."""
        return self.dropout(self.tokens(tokens), samples.keys)


class Attention(nn.Module):
    """Causal self-attention with GQA (Ainslie et al., arXiv 2305.13245) and optional QK-norm.

    In GQA, several query heads share one key-value head; QK-norm normalizes each head's queries and keys. The rows of
    `qkv` are grouped by key-value head: the queries that it serves, its keys, its values. A contiguous shard thus has
    whole groups. A rank that shares its key-value head with other ranks has some of the queries that this head serves.
    """

    def __init__(self, config: LlamaConfig, layer: int, name: str) -> None:
        super().__init__()
        self.head_dim, groups = config.head_dim, config.num_key_value_heads
        self.served = config.num_attention_heads // groups
        rows = (self.served + 2) * groups * self.head_dim
        self.qkv = Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.q_norm = _norm(self.head_dim, config) if config.qk_norm else nn.Identity()
        self.k_norm = _norm(self.head_dim, config) if config.qk_norm else nn.Identity()
        self.rotary = Rotary(config.head_dim, config.rope_theta, rope_scaling(config))
        self.core = CausalAttention(
            config.attention_dropout, config.window(layer), f"{name}.core", softcap=config.attention_softcap
        )
        self.proj = Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        rows = self.qkv(x)
        served = self.served // self.qkv.unit_parts
        groups = rows.unflatten(-1, (-1, served + 2, self.head_dim))  # [B, S, groups, served + 2, d]
        q, k, v = groups.split((served, 1, 1), 3)
        q, k, v = (each.flatten(2, 3) for each in (q, k, v))  # [B, S, heads or groups, d]
        q, k = self.rotary(self.q_norm(q), self.k_norm(k))
        return self.proj(self.core(q, k, v, samples))


class Block(nn.Module):
    """One transformer layer, with normalization before each half."""

    attention: ClassVar[type[nn.Module]] = Attention

    def __init__(self, config: LlamaConfig, layer: int, name: str) -> None:
        super().__init__()
        self.attn_norm = _norm(config.hidden_size, config)
        self.attn = self.attention(config, layer, f"{name}.attn")
        self.mlp_norm = _norm(config.hidden_size, config)
        dense = not config.has_experts(layer)
        self.mlp = SwiGLU(config.hidden_size, config.ffn_hidden_size) if dense else MixtureOfExperts(config)
        self.dropout = nn.ModuleDict(
            {half: Dropout(config.hidden_dropout, f"{name}.dropout.{half}") for half in ("attn", "mlp")}
        )

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        x = x + self.dropout["attn"](self.attn(self.attn_norm(x), samples), samples.keys)
        return x + self.dropout["mlp"](self.mlp(self.mlp_norm(x), samples), samples.keys)


class Llama(Decoder):
    """The whole model, of a resolved config (no field is None)."""

    block: ClassVar[type[nn.Module]] = Block

    def __init__(self, config: LlamaConfig) -> None:
        head = Head(_norm(config.hidden_size, config), config.hidden_size, config.vocab_size)
        blocks = (self.block(config, layer, f"blocks.{layer}") for layer in range(config.num_layers))
        super().__init__(Input(config), blocks, head, config.tie_embeddings)


def _norm(width: int, config: LlamaConfig) -> nn.RMSNorm:
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""
    return nn.RMSNorm(width, config.norm_eps)
