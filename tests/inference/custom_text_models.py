"""User's own language models whose layers pass tuples on and take `samples`, and one that is no language model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.models.plan import Plan
from threefold.models.sharding import Column, Replicated, Row, Vocab
from threefold.random.dropout import Dropout

WIDTH = 10


class Start(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens(ids), torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


class Block(nn.Module):
    """Mix the positions before each one; drop by the samples' keys."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.dropout = Dropout(0.1, name)

    def forward(self, x: Tensor, places: Tensor, samples: Any) -> tuple[Tensor, Tensor]:
        mixed = x.cumsum(1) / (places + 1).unsqueeze(-1)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(mixed)))), samples.keys), places


class End(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, vocab_size)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.output(x + 0.1 * torch.sin(places.unsqueeze(-1).to(x.dtype)))


RULES = {"start.tokens": Vocab(), "blocks.*.up": Column(), "blocks.*.down": Row(), "end.output": Vocab()}


class Placed(nn.Module):
    """Model whose layers pass (hidden, places) on; it has no `forward` of its own."""

    plan = Plan(layers=["start", "blocks.*", "end"], shard=RULES)

    def __init__(self, vocab_size: int, blocks: int = 2) -> None:
        super().__init__()
        self.start = Start(vocab_size)
        self.blocks = nn.ModuleList(Block(f"blocks.{number}.dropout") for number in range(blocks))
        self.end = End(vocab_size)


class Pooled(nn.Module):
    """Model of one score per sample."""

    plan = Plan(layers=["embed", "end"], shard={"embed": Vocab(), "end": Replicated()})

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.end = nn.Embedding(vocab_size, WIDTH), Pool()


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x.mean(1))


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    if output.shape[-1] == 1:
        return (output - batch[1][:, :1].to(output.dtype) / 100).square().mean()
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())
