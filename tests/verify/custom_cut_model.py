"""User's own model with a fused layer for queries, keys and values, sharded standalone parameters, and odd sizes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.custom_token_model import HEAD, Embed, Head
from threefold.models.plan import Plan
from threefold.models.sharding import Column, Replicated, Row, Sharded, Vocab

HEADS, INNER = 6, 25


class FusedBlock(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.temperature = nn.Parameter(torch.rand(1, HEADS, 1, 1) + 0.5)  # one per head
        self.out = nn.Linear(width, width)
        self.mlp = GatedMlp(width)

    def forward(self, x: Tensor, samples: object = None) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q * self.temperature, k, v, is_causal=True)
        return self.mlp(x + self.out(attended.transpose(1, 2).flatten(2)))


class GatedMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, INNER), nn.Linear(INNER, width)
        self.scales = nn.Parameter(torch.rand(2, INNER) + 0.5)  # one per feature

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.scales
        return x + self.down(F.gelu(self.up(x) * scale + shift))


class Fused(nn.Module):
    plan = Plan(
        layers=["embed", "blocks.*", "head"],
        shard={
            "embed.tokens": Vocab(),
            "embed.positions": Replicated(),
            "blocks.*.qkv": Column(heads=HEADS, groups=3),
            "blocks.*.temperature": Sharded(1, heads=HEADS),
            "blocks.*.out": Row(heads=HEADS),
            "blocks.*.mlp.up": Column(),
            "blocks.*.mlp.scales": Sharded(1),
            "blocks.*.mlp.down": Row(),
            "head.output": Vocab(),
        },
    )

    def __init__(self, vocab_size: int, max_position_embeddings: int, blocks: int = 3) -> None:
        super().__init__()
        width = HEADS * HEAD
        self.embed = Embed(vocab_size, max_position_embeddings, width)
        self.blocks = nn.ModuleList(FusedBlock(max_position_embeddings, width) for _ in range(blocks))
        self.head = Head(vocab_size, width)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, samples: object = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x, labels)
