"""Unusual parameters and buffers of a user's model: gradients and weights of each are those of plain PyTorch in one
process, with an optimizer whose kernel goes by the order in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threefold
from tests.support.sweep import sweep
from threefold import Column, Row, Sharded
from threefold.models.sharding import Split
from threefold.models.source import construct
from threefold.parallel.parameter import like, whole
from threefold.verify.compare import largest, relative_error

WORDS, WIDTH, LENGTH, SAMPLES, STEPS = 23, 8, 5, 8, 3


class Strided(nn.Module):
    """Weights with another order in memory, or with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())
        self.gaps = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t()[::2])
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.convolution.weight = nn.Parameter(self.convolution.weight.data.permute(2, 0, 1).clone().permute(1, 2, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x @ self.transposed.t()) @ self.transposed / 4
        return x + F.linear(x, self.gaps) + self.convolution(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    """torch modules that also keep their weights in a list, or under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.lstm(x)[0]
        return x + self.attention(x, x, x, need_weights=False)[0]


class Padded(nn.Module):
    """Embedding with a row that no sample trains."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=-2)
        with torch.no_grad():
            self.table.weight.add_(0.1)  # as with loaded weights, where the row need not be zero

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Tables(nn.Module):
    """Buffers with a value per head: slopes, a table of several dims, and a switch that is not a float."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", torch.rand(4, 1), persistent=False)
        self.register_buffer("shifts", torch.rand(2, 4), persistent=False)
        self.register_buffer("on", torch.arange(4) % 3 != 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.heads(x).unflatten(-1, (-1, WIDTH // 4)) * self.slopes + self.shifts[1].unsqueeze(-1)
        return x + self.out(torch.tanh(y * self.on.unsqueeze(-1)).flatten(-2))


class Odd(nn.Module):
    """One of these modules between embeddings and a head; it has no `forward` of its own."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.start = Padded()
        self.middle = nn.ModuleList(kind() for _ in range(2))
        self.end = nn.Linear(WIDTH, WORDS)


def plan_of(**rules: Split) -> threefold.Plan:
    shard = {"start.table": threefold.Vocab(), "middle.*": threefold.Replicated(), "end": threefold.Vocab()}
    more = {name.replace("__", "."): rule for name, rule in rules.items()}
    return threefold.Plan(["start", "middle.*", "end"], {**shard, **{f"middle.*.{key}": more[key] for key in more}})


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(900 + step)
    return tuple(torch.randint(WORDS, (SAMPLES, LENGTH), generator=made) for _ in range(2))  # type: ignore[return-value]


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose kernel follows the order in memory; `eps` keeps rounding from deciding."""
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3, fused=True)


Trained = list[dict[str, Tensor]]
"""Loss, gradients and then weights by name, for each step."""


def plain(kind: type[nn.Module]) -> Trained:
    """Train in one process with torch alone."""
    model = construct(lambda: Odd(kind), 3).double()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, fused=False, foreach=False), []
    for step in range(STEPS):
        batch = batch_of(step)
        optimizer.zero_grad()
        x = model.start(batch[0])
        for layer in model.middle:
            x = layer(x)
        mean = loss(model.end(x), batch)
        mean.backward()
        seen = {f"gradient of {name}": each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
        seen |= {f"weight {name}": each.detach().clone() for name, each in model.named_parameters()}
        found.append({"loss": mean.detach(), **seen})
    return found


def in_layout(kind: type[nn.Module], sizes: dict[str, int], options: dict[str, Any], rules: dict[str, Any]) -> Trained:
    """Train on this rank of a layout; return whole tensors of its stages."""
    mesh = threefold.init_mesh(**sizes)
    settings: dict[str, Any] = {"dtype": torch.float64, "seed": 3, **options}
    model = threefold.parallelize(lambda: Odd(kind), plan_of(**rules), mesh, **settings)
    optimizer = threefold.distributed_optimizer(optimizer_of(model.parameters()), model)
    weights, found = model.gradient_step.model.weights, []
    for step in range(STEPS):
        size = SAMPLES // mesh.dp.size
        batch = tuple(each[mesh.dp.index * size :][:size] for each in batch_of(step))
        mean = model.train_batch(batch, loss)
        gradients = model.gradient_step.gradients
        seen = {f"gradient of {each.name}": _whole(each.parameter, gradients[each.leaf]) for each in weights}
        optimizer.step()
        seen |= {f"weight {each.name}": _whole(each.parameter, each.master) for each in weights}
        found.append({"loss": torch.tensor(mean, dtype=torch.float64), **seen})
    return found


def _whole(parameter: Tensor, part: Tensor) -> Tensor:
    return whole(like(parameter, part.detach().clone())).clone()


def departures(expected: Trained, ranks: list[Trained], tolerance: float = 1e-12) -> list[str]:
    """Return the differences of any rank in the order of computation, and values that no rank has."""
    found = []
    for step, seen in enumerate(expected):
        for name, value in seen.items():
            got = [rank[step][name] for rank in ranks if name in rank[step]]
            scale = max(largest(value), 1e-6)
            worst = max((relative_error(each, value, scale) for each in got), default=float("inf"))
            if not worst <= tolerance:
                found.append(f"step {step + 1}: {name} by {worst:.1e}")
    return found


def prepared(kind: type[nn.Module], sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights after the steps with `prepare`, for a model with values."""
    mesh = threefold.init_mesh(**sizes)
    made = _Called(construct(lambda: Odd(kind), 3).double())
    model, optimizer = threefold.prepare(made, optimizer_of(made.parameters()), **options)
    for step in range(STEPS):
        size = SAMPLES // mesh.dp.size
        batch = tuple(each[mesh.dp.index * size :][:size] for each in batch_of(step))
        optimizer.zero_grad()
        threefold.backward(loss(model(batch[0]), batch))
        optimizer.step()
    return {
        name.removeprefix("module.").removeprefix("odd."): _full(each).detach().clone()
        for name, each in model.named_parameters()
    }


def _full(parameter: Any) -> Tensor:
    full: Callable[[], Tensor] | None = getattr(parameter, "full_tensor", None)
    return parameter if full is None else full()


class _Called(nn.Module):
    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.odd = odd

    def forward(self, ids: Tensor) -> Tensor:
        x = self.odd.start(ids)
        for layer in self.odd.middle:
            x = layer(x)
        return self.odd.end(x)


LAYOUTS = [
    ({}, {}),
    ({}, {"micro_batches": 2}),
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {"micro_batches": 2, "schedule": "zero-bubble"}),
    ({"dp": 2}, {"zero": 1}),
    ({"dp": 2, "tp": 2}, {"zero": 3, "micro_batches": 2}),
]


@sweep(("sizes", "options"), LAYOUTS, quick=(0, 4, 6))
def test_weights_in_any_order_in_memory(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = sizes.get("dp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
    assert departures(plain(Strided), pool.run(ranks, in_layout, Strided, sizes, options, {})) == []


@sweep(("sizes", "options"), LAYOUTS, quick=(6,), slow=(0, 4))
def test_recurrent_weights(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = sizes.get("dp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
    assert departures(plain(Recurrent), pool.run(ranks, in_layout, Recurrent, sizes, options, {})) == []


@sweep(("sizes", "options"), [({}, {}), ({"dp": 2}, {}), ({"dp": 2}, {"zero": 3})], quick=(2,))
def test_prepared_weights_in_any_order_in_memory(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    after = {name: each for name, each in plain(Strided)[STEPS - 1].items() if name.startswith("weight ")}
    for found in pool.run(sizes.get("dp", 1), prepared, Strided, sizes, options):
        assert {f"weight {name}" for name in found} == set(after)
        for name, weight in found.items():
            torch.testing.assert_close(weight, after[f"weight {name}"], rtol=1e-11, atol=1e-12)


HEADS = {
    "heads": Column(heads=4),
    "out": Row(heads=4),
    "slopes": Sharded(0, heads=4),
    "shifts": Sharded(1, heads=4),
    "on": Sharded(0),
}


@sweep(
    ("sizes", "options"),
    [({"tp": 2}, {}), ({"tp": 4}, {}), ({"dp": 2, "tp": 2}, {"zero": 2}), ({"tp": 2, "pp": 2}, {"micro_batches": 2})],
    quick=(0, 3),
)
def test_buffers_of_a_value_for_each_head_are_cut(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    found = pool.run(sizes.get("dp", 1) * sizes["tp"] * sizes.get("pp", 1), in_layout, Tables, sizes, options, HEADS)
    assert departures(plain(Tables), found) == []
