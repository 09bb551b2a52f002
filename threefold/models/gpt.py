"""GPT-2 (Radford et al., 2019; sizes up to GPT-3, Brown et al., arXiv 2005.14165), written for one device.

Nothing here knows of ranks. `gpt_split.py` beside this file says how each weight is cut when the model is spread over a
mesh. The `keys` that the layers pass along are one 64-bit number per sample, from which dropout masks follow; without
them nothing is dropped.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.config import ModelConfig
from threefold.kernels import causal_attention
from threefold.models.layers import CrossEntropy, Embedding, Linear
from threefold.parallel.random import Dropout, name_sites


class Input(nn.Module):
    """Token and position embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.positions = Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(self, tokens: Tensor, keys: Tensor | None = None) -> Tensor:
        """int64 [B, S] → [B, S, H]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.dropout(x, keys)


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` are ordered by head, so a contiguous cut is a cut between heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))  # [B, S, heads, 3, d]
        return self.proj(self._drop_and_attend(qkv, keys) if self.dropout.draws(keys) else causal_attention(qkv))

    def _drop_and_attend(self, qkv: Tensor, keys: Tensor | None) -> Tensor:
        q, k, v = qkv.transpose(1, 2).unbind(3)  # each [B, heads, S, d]
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        weights = (q @ k.mT * self.head_dim**-0.5).masked_fill(future, -torch.inf).softmax(-1)
        return (self.dropout(weights, keys) @ v).transpose(1, 2).flatten(2)


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
        self.attn_norm = nn.LayerNorm(config.hidden_size)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)
        self.dropout = nn.ModuleDict({name: Dropout(config.hidden_dropout) for name in ("attn", "mlp")})

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        x = x + self.dropout["attn"](self.attn(self.attn_norm(x), keys), keys)
        return x + self.dropout["mlp"](self.mlp(self.mlp_norm(x)), keys)


class Head(nn.Module):
    """Final norm, projection to the vocabulary and loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.output = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = CrossEntropy()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[B, S, H] → logits [B, S, V], or with `labels` [B, S] the sum of the losses of the tokens that count."""
        logits = self.output(self.norm(x))
        return logits if labels is None else self.loss(logits, labels).sum()


class GPT(nn.Module):
    """The whole model.

    Args:
        config: its sizes, resolved (no field is None).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = Input(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        if config.tie_embeddings:
            self.head.output.weight = self.embed.tokens.weight
        name_sites(self)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Logits, or the summed loss.

        Args:
            tokens: int64 [B, S].
            labels: int64 [B, S], -100 where a token does not count; None for logits.
            keys: int64 [B], the samples' dropout keys; None to drop nothing.

        Returns:
            logits [B, S, V], or a scalar: the sum over the tokens that count.
        """
        x = self.embed(tokens, keys)
        for block in self.blocks:
            x = block(x, keys)
        return self.head(x, labels)
