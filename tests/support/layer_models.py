"""A model written with parallel layers, its plain namesake, and their batches."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.axis import Axis
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

WORDS, WIDTH, INNER = 13, 6, 11
"""Sizes that two, three and four ranks do not divide; of 5 rows the last of four ranks has none."""


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.few, self.middle = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x + self.middle(torch.tanh(self.few(x))))


class Split(Plain):
    """The same, hand-written: some layers parallel, others plain, and the row layers' biases whole."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(WORDS, WIDTH, tp)  # type: ignore[assignment]
        self.up = ColumnParallelLinear(WIDTH, INNER, tp, gather_output=False)  # type: ignore[assignment]
        self.down = RowParallelLinear(INNER, WIDTH, tp, input_is_parallel=True)  # type: ignore[assignment]
        self.few = ColumnParallelLinear(WIDTH, 5, tp)  # type: ignore[assignment]
        self.head = ColumnParallelLinear(WIDTH, WORDS, tp, bias=False)  # type: ignore[assignment]


@contextmanager
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def both(tp: Axis) -> tuple[Plain, Split]:
    """The plain model, and one of parallel layers with its weights."""
    torch.manual_seed(0)
    with double():
        plain, split = Plain(), Split(tp)
    split.load_state_dict(plain.state_dict())  # whole tensors, of which each rank keeps its part
    return plain, split


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, WORDS, (6, 5), generator=torch.Generator().manual_seed(step))
    return ids, ids.roll(1, 1)


def loss_of(model: nn.Module, step: int = 0, part: slice = slice(None)) -> Tensor:
    ids, labels = batch(step)
    return F.cross_entropy(model(ids[part]).flatten(0, 1), labels[part].flatten())
