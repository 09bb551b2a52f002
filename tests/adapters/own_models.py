"""Models of one's own that give themselves adapters."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threefold as t3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 22), nn.Linear(22, 12)
        self.joined, self.back = nn.Linear(12, 30), nn.Linear(10, 12, bias=False)

    def forward(self, x: Tensor, samples: object = None) -> Tensor:
        y = self.norm(x)
        one, other, gate = self.joined(y).chunk(3, -1)
        return x + self.down(F.gelu(self.up(y))) + self.back(torch.sigmoid(gate) * one * other)


class Tuned(nn.Module):
    """Its layers are divided by columns, in groups of columns, by rows and by vocabulary."""

    dora = False
    plan = t3.Plan(
        layers=["embed", "blocks.*", "output"],
        shard={
            "embed": t3.Vocab(),
            "blocks.*.up": t3.Column(),
            "blocks.*.down": t3.Row(),
            "blocks.*.joined": t3.Column(groups=3),
            "blocks.*.back": t3.Row(),
            "output": t3.Vocab(),
        },
    )

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(vocab_size, 12), nn.Linear(12, vocab_size)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        t3.add_adapter(self, rank=3, alpha=7, targets=["blocks.**", "output"], dora=self.dora, seed=4)


class WithMagnitudes(Tuned):
    dora = True


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over the samples; labels that do not count add nothing."""
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="none").mean()
