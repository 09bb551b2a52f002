"""Model given as a list of layers whose first and last stage share a weight, with its data and loss."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threefold
from threefold.models.sharding import Column, Row

WORDS, WIDTH = 11, 6


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def layers() -> threefold.PipelineLayers:
    made = [lambda: nn.Embedding(WORDS, WIDTH), Mix, Mix, Mix, lambda: nn.Linear(WIDTH, WORDS, bias=False)]
    return threefold.PipelineLayers(made, tied=[("4.weight", "0.weight")], shard={"*.up": Column(), "*.down": Row()})


def loss_fn(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def data() -> list[tuple[Tensor, Tensor]]:
    words = torch.randint(WORDS, (24, 5), generator=torch.Generator().manual_seed(1))
    return [(each, (each * 3 + 1) % WORDS) for each in words]
