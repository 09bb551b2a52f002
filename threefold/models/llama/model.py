"""Llama (Touvron et al., arXiv 2302.13971), and the families that grew from it, written for one device.

`sharding.py` beside this file declares how each weight is sharded over a mesh. Layers pass along `samples`, which hold
a 64-bit number per sample that keys the dropout masks, and the documents that the attention mask separates. Each module
with dropout gets its name in the model, which also keys its masks.
"""

from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import NOTHING, Decoder, Embedding, Head, Linear, SampleInfo
from threefold.models.layers.experts import MixtureOfExperts, SwiGLU
from threefold.models.layers.norms import WidthNorm, rms_norm
from threefold.models.layers.prediction import PredictingHead, look_ahead
from threefold.models.layers.rope_scaling import rope_scaling
from threefold.models.llama import LlamaConfig
from threefold.random.dropout import Dropout


class Input(nn.Module):
    """Token embeddings, times the scale that the config may set."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.scale = config.embedding_scale
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout, "embed.dropout")

    def forward(self, tokens: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """int64 [B, S] → [B, S, H]."""
        x = self.tokens(tokens)
        return self.dropout(x if self.scale == 1 else x * self.scale, samples.keys)


class Attention(nn.Module):
    """Causal self-attention with GQA (Ainslie et al., arXiv 2305.13245), and optional QK-norm and gates of the output.

    In GQA, several query heads share one key-value head; QK-norm normalizes queries and keys. The rows of `qkv` are
    grouped by key-value head: the queries that it serves, the gates of their outputs, its keys, its values. A
    contiguous shard thus has whole groups. A rank that shares its key-value head with other ranks has some of the
    queries that this head serves, and their gates.
    """

    def __init__(self, config: LlamaConfig, layer: int, name: str) -> None:
        super().__init__()
        self.head_dim, groups = config.head_dim, config.num_key_value_heads
        self.served = config.num_attention_heads // groups
        self.gates = 1 if config.attention_gate else 0  # for each head
        rows = (self.served * (1 + self.gates) + 2) * groups * self.head_dim
        self.qkv = Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.q_norm = _norm_of_heads(config, config.num_attention_heads)
        self.k_norm = _norm_of_heads(config, groups)
        scaling = rope_scaling(config) if config.scales_rope(layer) else None
        self.rotary = Rotary(config.rotary_dim, config.rope_base(layer), scaling)
        scale = None if config.attention_scale == self.head_dim**-0.5 else config.attention_scale
        core = config.attention_dropout, config.window(layer), f"{name}.core"
        sinks = config.num_attention_heads if config.attention_sinks else 0
        self.core = CausalAttention(*core, scale=scale, softcap=config.attention_softcap, sinks=sinks)
        self.proj = Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=config.proj_bias)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        rows = self.qkv(x)
        served = self.served // self.qkv.unit_parts
        gates = self.gates * served
        groups = rows.unflatten(-1, (-1, served + gates + 2, self.head_dim))  # [B, S, groups, heads of each, d]
        parts = groups.split((served, gates, 1, 1), 3)
        q, gate, k, v = (each.flatten(2, 3) for each in parts)  # [B, S, heads or groups, d]
        q, k = self.rotary(self.q_norm(q), self.k_norm(k))
        out = self.core(q, k, v, samples)
        return self.proj(out * gate.flatten(2).sigmoid() if gates else out)


def _norm_of_heads(config: LlamaConfig, heads: int) -> nn.Module:
    if not config.qk_norm:
        return nn.Identity()
    if config.qk_norm_over == "width":
        return WidthNorm(heads, config.head_dim, config.norm_eps, config.norm_offset)
    return rms_norm(config.head_dim, config.norm_eps, config.norm_offset)


class Block(nn.Module):
    """One transformer layer, with normalization before each half, on its output, or both."""

    attention: ClassVar[type[nn.Module]] = Attention

    def __init__(self, config: LlamaConfig, layer: int, name: str) -> None:
        super().__init__()
        before, after = config.norm_position != "after", config.norm_position != "before"
        self.attn_norm = _norm(config, before)
        self.attn = self.attention(config, layer, f"{name}.attn")
        self.attn_out_norm = _norm(config, after)
        self.mlp_norm = _norm(config, before)
        dense = not config.has_experts(layer)
        inner, activation = config.ffn_hidden_size, config.gate_activation
        self.mlp = SwiGLU(config.hidden_size, inner, activation) if dense else MixtureOfExperts(config, activation)
        self.mlp_out_norm = _norm(config, after)
        self.dropout = nn.ModuleDict(
            {half: Dropout(config.hidden_dropout, f"{name}.dropout.{half}") for half in ("attn", "mlp")}
        )

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        x = x + self.dropout["attn"](self.attn_out_norm(self.attn(self.attn_norm(x), samples)), samples.keys)
        return x + self.dropout["mlp"](self.mlp_out_norm(self.mlp(self.mlp_norm(x), samples)), samples.keys)


class Llama(Decoder):
    """The whole model, of a resolved config (no field is None)."""

    block: ClassVar[type[nn.Module]] = Block

    def __init__(self, config: LlamaConfig) -> None:
        blocks = (self.block(config, layer, f"blocks.{layer}") for layer in range(config.num_layers))
        super().__init__(Input(config), blocks, self._head(config), config.tie_embeddings)
        if isinstance(self.head, PredictingHead):
            self.head.tokens.weight = self.embed.get_submodule("tokens").weight  # type: ignore[assignment]

    def _head(self, config: LlamaConfig) -> Head:
        sizes = _norm(config), config.hidden_size, config.vocab_size, config.logit_softcap
        if not config.mtp_layers:
            return Head(*sizes, scale=1 / config.width)
        last, names = config.num_layers - 1, (f"head.depths.{depth}.block" for depth in range(config.mtp_layers))
        further = [self.block(config, last, name) for name in names]
        return PredictingHead(sizes, partial(_norm, config), further, config.mtp_loss, config.embedding_scale)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, samples: SampleInfo = NOTHING) -> Tensor:
        if labels is None or not isinstance(self.head, PredictingHead):
            return super().forward(tokens, labels, samples)
        x = self.embed(tokens, samples)
        for block in self.blocks:
            x = block(x, samples)
        loss: Tensor = self.head(x, labels, look_ahead(samples, tokens, labels, len(self.head.depths)))
        return loss


def _norm(config: LlamaConfig, there: bool = True) -> nn.Module:
    return rms_norm(config.hidden_size, config.norm_eps, config.norm_offset) if there else nn.Identity()
