"""User's own model with nothing of this package in its layers: they take and return one tensor; the loss is a function.

Its plan is the one proposed in tests/verify/test_inspection.py.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.full((width // heads,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        size = len(self.temperature)
        q, k, v = (each(x).unflatten(-1, (-1, size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Plain(nn.Module):
    def __init__(self, vocab_size: int = 41, width: int = 20, blocks: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, 4, 37) for _ in range(blocks))
        self.mystery = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.mystery(x))


def loss(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


PLAN = """

from threefold import Column, PerHead, Plan, Replicated, Row, Vocab

plan = Plan(
    ["wte", "blocks.*", "mystery", "lm_head"],
    {
        "wte": Vocab(),
        **{f"blocks.*.attn.{name}": Column(heads=4) for name in "qkv"},
        "blocks.*.attn.proj": Row(heads=4),
        "blocks.*.attn.temperature": PerHead(),
        "blocks.*.fc1": Column(),
        "blocks.*.fc2": Row(),
        "mystery": Replicated(),
        "lm_head": Vocab(),
    },
)
"""
"""Its plan, to be added to a copy of this file."""
