"""User's own model in plain torch modules, with odd sizes, no symmetric matrix, two standalone weights and a tied one.

Its layers are called like those of built-in families: `layer(x, samples)`, the last one `layer(x, labels)`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.models.plan import Plan
from threefold.models.sharding import Column, Replicated, Row, Vocab

HEAD = 3


class Embed(nn.Module):
    def __init__(self, vocab: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.3 * torch.randn(length, width))

    def forward(self, tokens: Tensor, samples: object = None) -> Tensor:
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self, length: int, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)  # the gradient of a bias would be rounding alone
        self.mlp_norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.ones(length, length).tril().bool(), persistent=False)

    def forward(self, x: Tensor, samples: object = None) -> Tensor:
        size = x.shape[1]
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:size, :size])
        x = x + self.gate * self.out(attended.transpose(1, 2).flatten(2))
        return x + self.scale * self.down(F.silu(self.up(self.mlp_norm(x))))


class Head(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.output(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Tiny(nn.Module):
    plan = Plan(
        layers=["embed", "blocks.*", "head"],
        shard={
            "embed.tokens": Vocab(),
            "embed.positions": Replicated(),
            "blocks.*.query": Column(heads=6),
            "blocks.*.key": Column(heads=6),
            "blocks.*.value": Column(heads=6),
            "blocks.*.out": Row(heads=6),
            "blocks.*.gate": Replicated(),
            "blocks.*.up": Column(),
            "blocks.*.down": Row(),
            "head.output": Vocab(),
        },
        initial={"blocks.*.up.weight": nn.init.xavier_uniform_},
    )

    def __init__(self, vocab_size: int, max_position_embeddings: int, blocks: int = 5, inner: int = 25) -> None:
        super().__init__()
        width = 6 * HEAD
        self.embed = Embed(vocab_size, max_position_embeddings, width)
        self.blocks = nn.ModuleList(Block(max_position_embeddings, width, inner) for _ in range(blocks))
        self.head = Head(vocab_size, width)
        self.head.output.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, samples: object = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x, labels)
