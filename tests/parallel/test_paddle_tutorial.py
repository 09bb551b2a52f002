"""The losses printed in Paddle's tensor-parallel tutorial tests, on two ranks, both ranks bit-equal."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.sweep import sweep
from threefold.comm.axis import Axis
from threefold.comm.capture import capturable, capture_step
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.parallel.leaf import local
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


def train_captured(graph: str) -> tuple[list[float], Counter[str]]:
    """The same, each step one graph; beside the losses, the operators in it."""
    model, tokens, lr = setup(graph, capturable(Mesh(Layout(tp=torch.distributed.get_world_size())).tp))

    def descend_(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(gradient, alpha=lr)

    weights = [local(parameter) for parameter in model.parameters()]
    step = capture_step(lambda ids: model(ids).mean(), weights, descend_, torch.zeros(4, 2, dtype=torch.int64))
    losses = [step(torch.from_numpy(next(tokens)).long()).item() for _ in range(5)]
    return losses, Counter(str(node.target) for node in step.graph.graph.nodes if node.op == "call_function")


@sweep(("graph", "printed"), [("dynamic", DYNAMIC), ("static", STATIC)], quick=(0,))
def test_printed_losses_by_a_captured_graph(pool, graph: str, printed: list[float]) -> None:
    (first, operators), (second, _) = pool.run(2, train_captured, graph)
    assert first == second
    assert first == pytest.approx(printed, rel=1e-6)
    # Forward for the embedding and the pair of linears, backward for the pair; and the update of seven weights.
    assert operators["_c10d_functional.all_reduce.default"] == 3
    assert operators["aten.sub_.Tensor"] == 7
