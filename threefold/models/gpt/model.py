"""GPT-2 (Radford et al., 2019; sizes up to GPT-3, Brown et al., arXiv 2005.14165), written for one device.

`sharding.py` beside this file declares how each weight is sharded over a mesh. Layers pass along `samples`, which hold
a 64-bit number per sample that keys the dropout masks (without them, nothing is dropped) and the documents that the
attention mask separates. Each module with dropout gets its name in the model, which also keys its masks.
"""

from torch import Tensor, nn

from threefold.models.gpt import GPTConfig
from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import NOTHING, Decoder, Embedding, Head, Linear, PositionEmbedding, SampleInfo
from threefold.models.layers.rope_scaling import rope_scaling
from threefold.ops.kernels import ACTIVATIONS
from threefold.random.dropout import Dropout


class Input(nn.Module):
    """Token embeddings, plus position embeddings if these are learned."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        learned = config.position_embedding == "learned"
        self.positions = PositionEmbedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = Dropout(config.embedding_dropout, "embed.dropout")

    def forward(self, tokens: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """int64 [B, S] → [B, S, H]."""
        x = self.tokens(tokens)
        return self.dropout(x + self.positions(x, samples) if self.positions else x, samples.keys)


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` are ordered by head, so that a contiguous shard has whole heads."""

    def __init__(self, config: GPTConfig, name: str) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        rope = config.position_embedding == "rope"
        self.rotary = Rotary(config.head_dim, config.rope_theta, rope_scaling(config)) if rope else None
        self.proj = Linear(config.hidden_size, config.hidden_size)
        scale = 1 / config.head_dim if config.width_base else None
        self.core = CausalAttention(config.attention_dropout, name=f"{name}.core", scale=scale)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(3)  # each [B, S, heads, d]
        if self.rotary:
            q, k = self.rotary(q, k)
        return self.proj(self.core(q, k, v, samples))


class MLP(nn.Module):
    """Two linear layers with an activation function in between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, config.ffn_hidden_size)
        self.down = Linear(config.ffn_hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """One transformer layer, with normalization before each half."""

    def __init__(self, config: GPTConfig, name: str) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, f"{name}.attn")
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.ModuleDict(
            {half: Dropout(config.hidden_dropout, f"{name}.dropout.{half}") for half in ("attn", "mlp")}
        )

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        x = x + self.dropout["attn"](self.attn(self.attn_norm(x), samples), samples.keys)
        return x + self.dropout["mlp"](self.mlp(self.mlp_norm(x)), samples.keys)


class GPT(Decoder):
    """The whole model, of a resolved config (no field is None)."""

    def __init__(self, config: GPTConfig) -> None:
        norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        head = Head(norm, config.hidden_size, config.vocab_size, scale=1 / config.width)
        blocks = (Block(config, f"blocks.{layer}") for layer in range(config.num_layers))
        super().__init__(Input(config), blocks, head, config.tie_embeddings)
