"""GPT-2 (Radford et al., 2019; sizes up to GPT-3, Brown et al., arXiv 2005.14165), written for one device.

Nothing here knows of ranks. `gpt_split.py` beside this file says how each weight is cut when the model is spread over a
mesh. The `samples` that the layers pass along hold one 64-bit number per sample, from which dropout masks follow
(without them nothing is dropped), and the documents whose bounds attention keeps.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from threefold.config import ModelConfig
from threefold.models.decoder import Decoder, Head
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.basic import Embedding, Linear
from threefold.models.layers.rope import rotary
from threefold.models.layers.sample_info import NOTHING, Samples
from threefold.parallel.context.sequence import PositionEmbedding
from threefold.random.philox import Dropout


class Input(nn.Module):
    """Token embeddings, and those of the positions where they are learned."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        learned = config.position_embedding == "learned"
        self.positions = PositionEmbedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = Dropout(config.hidden_dropout)

    def forward(self, tokens: Tensor, samples: Samples = NOTHING) -> Tensor:
        """int64 [B, S] → [B, S, H]."""
        x = self.tokens(tokens)
        return self.dropout(x + self.positions(x, samples) if self.positions else x, samples.keys)


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` are ordered by head, so a contiguous cut is a cut between heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.rotary = rotary(config) if config.position_embedding == "rope" else None
        self.proj = Linear(config.hidden_size, config.hidden_size)
        self.core = CausalAttention(config.attention_dropout)

    def forward(self, x: Tensor, samples: Samples = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(3)  # each [B, S, heads, d]
        if self.rotary:
            q, k = self.rotary(q, k)
        return self.proj(self.core(q, k, v, samples))


class MLP(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, config.ffn_hidden_size)
        self.down = Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer layer, normalised before each half."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.ModuleDict({name: Dropout(config.hidden_dropout) for name in ("attn", "mlp")})

    def forward(self, x: Tensor, samples: Samples = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        x = x + self.dropout["attn"](self.attn(self.attn_norm(x), samples), samples.keys)
        return x + self.dropout["mlp"](self.mlp(self.mlp_norm(x)), samples.keys)


class GPT(Decoder):
    """The whole model.

    Args:
        config: its sizes, resolved (no field is None).
    """

    def __init__(self, config: ModelConfig) -> None:
        head = Head(nn.LayerNorm(config.hidden_size, config.norm_eps), config)
        blocks = (Block(config) for _ in range(config.num_layers))
        super().__init__(Input(config), blocks, head, config.tie_embeddings)
