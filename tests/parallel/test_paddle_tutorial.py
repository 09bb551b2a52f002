"""The losses printed in Paddle's tensor-parallel tutorial tests, on two ranks, both ranks bit-equal."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

DYNAMIC = [0.0, -0.14513375, -0.2902736, -0.43542737, -0.5806184]
STATIC = [11.943981, -2.2283082, -13.341571, -29.284101, -63.219418]


class Tutorial(nn.Module):
    """Embedding, a column- and a row-parallel linear, and a plain one; vocabulary 20, hidden 10, inner 8."""

    def __init__(self, axis: Axis, first: np.ndarray, second: np.ndarray, third: float) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(20, 10, axis, name="embedding")
        torch.nn.init.constant_(self.embedding.weight, 0.5)
        self.up = ColumnParallelLinear.from_linear(linear(first), axis, gather_output=False)
        self.down = RowParallelLinear.from_linear(linear(second), axis, input_is_parallel=True)
        self.last = linear(np.full((10, 10), third))

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.down(self.up(self.embedding(ids))))


def linear(weight: np.ndarray) -> nn.Linear:
    """A linear layer with this weight ([in, out], as Paddle stores it) and no bias to speak of."""
    layer = nn.Linear(*weight.shape)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight.T))
        layer.bias.zero_()
    return layer


def dynamic_tokens(stream: np.random.RandomState) -> Iterator[np.ndarray]:
    while True:
        yield stream.randint(0, 20, (4, 2))


def static_tokens(stream: np.random.RandomState) -> Iterator[np.ndarray]:
    while True:
        yield np.stack([stream.randint(0, 20, [2]) for _ in range(4)])


Setup = tuple[nn.Module, Iterator[np.ndarray], float]


def setup(graph: str, axis: Axis) -> Setup:
    """Model, tokens and learning rate."""
    stream = np.random.RandomState(1024)
    first, second = stream.random_sample((10, 8)), stream.random_sample((8, 10))
    if graph == "dynamic":
        return Tutorial(axis, first, second, 0.0), dynamic_tokens(stream), 0.001
    return Tutorial(axis, first, second, 0.1), static_tokens(np.random.RandomState(2021)), 0.1


def train(graph: str) -> list[float]:
    model, tokens, lr = setup(graph, Mesh(Layout(tp=torch.distributed.get_world_size())).tp)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(5):
        loss = model(torch.from_numpy(next(tokens)).long()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("graph", "printed"), [("dynamic", DYNAMIC), ("static", STATIC)])
def test_printed_losses(pool, graph: str, printed: list[float]) -> None:
    first, second = pool.run(2, train, graph)
    assert first == second
    assert first == pytest.approx(printed, rel=1e-6)
