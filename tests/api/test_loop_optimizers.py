"""Optimizers that need whole weights, and several optimizers of one model, in a loop of one's own: against torch alone,
with a weight that is tied across pipeline stages."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import threefold
from tests.api.layer_list import data, layers, loss_fn
from tests.support.parity import whole_tensors
from tests.support.sweep import sweep

STEPS = 3


class Normed(torch.optim.Optimizer):
    """Divides by the norm of the whole weight, and keeps a number, a vector and a tensor of the weight's shape."""

    needs_whole_matrices = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["steps"] = state.get("steps", 0) + 1
                sums = state.setdefault(
                    "sums", torch.zeros_like(each).flatten(1).sum(1) if each.dim() > 1 else each * 0
                )
                sums += each.grad.abs().flatten(1).sum(1) if each.dim() > 1 else each.grad.abs()
                average = state.setdefault("average", torch.zeros_like(each))
                average.lerp_(each.grad, 0.5)
                each.sub_(average / (average.norm() + sums.mean()), alpha=group["lr"] / state["steps"])


def muon(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
    matrices, others = ([each for each in parameters if (each.dim() == 2) is flag] for flag in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


KINDS: dict[str, Callable[[list[Tensor]], list[torch.optim.Optimizer]]] = {
    "muon": muon,
    "adafactor": lambda parameters: [torch.optim.Adafactor(parameters, lr=0.05, weight_decay=0.01)],
    "normed": lambda parameters: [Normed(parameters, lr=0.3)],
}


def batches() -> list[Any]:
    return list(threefold.DistributedDataLoader(data(), 8))[:STEPS]


def mine(batch: Any, mesh: threefold.Mesh) -> Any:
    rows = 8 // mesh.dp.size
    return tuple(part[mesh.dp.index * rows : (mesh.dp.index + 1) * rows] for part in batch)


def made(kind: str, mesh: threefold.Mesh, options: dict[str, Any]) -> Any:
    model = threefold.parallelize(layers(), mesh=mesh, dtype=torch.float64, **options)
    return model, threefold.distributed_optimizer(KINDS[kind](list(model.parameters())), model, clip_grad_norm=0.5)


def weights(model: threefold.types.DistributedModel, optimizer: threefold.types.ModelOptimizer) -> dict[str, Tensor]:
    seen: Any = SimpleNamespace(
        optimizer=optimizer,
        mesh=model.mesh,
        model=model.gradient_step.model,
        parallelism=model.gradient_step.parallelism,
    )
    return whole_tensors(seen, "master")


def trained(sizes: dict[str, int], options: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    mesh, found = threefold.init_mesh(**sizes), {}
    for kind in KINDS:
        model, optimizer = made(kind, mesh, options)
        for batch in batches():
            model.train_batch(mine(batch, mesh), loss_fn)
            optimizer.step()
        found[kind] = weights(model, optimizer)
    return found


def plain() -> dict[str, dict[str, Tensor]]:
    """Torch alone, from the same weights."""
    found = {}
    for kind, make in KINDS.items():
        first = threefold.parallelize(layers(), mesh=threefold.init_mesh(), dtype=torch.float64)
        initial = {name: weight.detach() for name, weight in first.named_parameters()}
        model = layers()().double()
        model.load_state_dict(initial | {"4.weight": initial["0.weight"]})
        optimizers = make(list(model.parameters()))
        for batch in batches():
            model.zero_grad()
            loss_fn(model(batch[0]), batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for each in optimizers:
                each.step()
        found[kind] = {name: weight.detach() for name, weight in model.named_parameters()}
        assert not torch.equal(found[kind]["1.up.weight"], initial["1.up.weight"])
    return found


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 2, "tp": 2}, {"zero": 1}),
    ({"dp": 2}, {}),
    ({"tp": 3}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"dp": 4}, {"zero": 3}),
    ({"dp": 2, "pp": 2, "tp": 2}, {"zero": 1, "micro_batches": 2}),
]


def assert_near(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    for kind, values in found.items():
        for name, value in values.items():
            torch.testing.assert_close(value, expected[kind][name], rtol=1e-12, atol=1e-12, msg=f"{kind} {name}")


@sweep(("sizes", "options"), LAYOUTS, quick=(0,))
def test_whole_weights_are_updated_as_by_torch_alone(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    (expected,) = pool.run(1, plain)
    ranks = torch.tensor(list(sizes.values())).prod().item()
    found = pool.run(ranks, trained, sizes, options)
    assert {name for each in found for name in each["muon"]} == expected["muon"].keys()
    for each in found:
        assert_near(each, expected)


def begun(sizes: dict[str, int], options: dict[str, Any], folder: Path) -> None:
    mesh = threefold.init_mesh(**sizes)
    for kind in KINDS:
        model, optimizer = made(kind, mesh, options)
        for batch in batches()[:2]:
            model.train_batch(mine(batch, mesh), loss_fn)
            optimizer.step()
        threefold.save(folder / kind, 2, model=model, optimizer=optimizer)


def resumed(sizes: dict[str, int], options: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    mesh, found = threefold.init_mesh(**sizes), {}
    for kind in KINDS:
        model, optimizer = made(kind, mesh, options)
        assert threefold.load(folder / kind, model=model, optimizer=optimizer) == 2
        model.train_batch(mine(batches()[2], mesh), loss_fn)
        optimizer.step()
        found[kind] = weights(model, optimizer)
    number = next(iter(optimizer.optimizer.state.values()))["steps"]
    return found, f"{type(number).__name__} {number}"


@pytest.mark.slow
def test_their_state_continues_in_another_layout(pool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, plain)
    pool.run(4, begun, {"dp": 2, "tp": 2}, {"zero": 1}, tmp_path)
    for found, number in pool.run(6, resumed, {"dp": 2, "tp": 3}, {"zero": 3}, tmp_path):
        assert_near(found, expected)
        assert number == "int 3"


def changed_weights(sizes: dict[str, int]) -> dict[str, dict[str, Tensor]]:
    """An update of weights that something else has changed since the optimizer gathered them."""
    mesh, found = threefold.init_mesh(**sizes), {}
    for kind in KINDS:
        model, optimizer = made(kind, mesh, {})
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-1)
        model.publish()
        model.train_batch(batches()[0], loss_fn)
        optimizer.step()
        found[kind] = weights(model, optimizer)
    return found


def test_weights_that_were_changed_are_the_ones_updated(pool) -> None:
    (expected,) = pool.run(1, changed_weights, {})
    for found in pool.run(2, changed_weights, {"tp": 2}):
        assert_near(found, expected)
