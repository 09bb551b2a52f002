"""The schedule of a config and groups by patterns in loops of one's own, against runs and against torch alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import threefold
from tests.api.layer_list import data, layers, loss_fn
from tests.support.parity import whole_tensors
from tests.support.sweep import sweep
from tests.train.support import Run, steps_of, train_rank
from threefold.errors import UserError
from threefold.verify.worker_pool import WorkerPool

CONFIG: dict[str, Any] = {
    "data": {"path": "none", "sequence_length": {0: 8, 4: 16}},
    "optimizer": {"lr": 0.1, "warmup_steps": 2, "decay": "wsd", "stable_steps": 2, "min_lr": 0.01},
    "train": {"max_steps": 8, "global_batch_size": {0: 4, 4: 8}},
}
GROUPS = [
    {"match": "**.bias", "weight_decay": 0.0},
    {"match": "2", "lr_scale": 0.5, "betas": (0.5, 0.9)},
    {"match": "*.down.bias", "lr_scale": 3.0},
]


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_it_has_the_rates_of_a_run(pool: WorkerPool, small_run: Run, tmp_path: Path, decay: str) -> None:
    settings = (("optimizer.decay", decay), ("optimizer.decay_steps", 5), ("train.global_batch_size", {0: 8, 3: 16}))
    run = small_run.but(steps=6, set=settings)
    pool.run(1, train_rank, run, tmp_path)
    schedule = threefold.Schedule.of(run.config)
    steps = steps_of(tmp_path)
    assert schedule.steps == len(steps) == 6
    assert [schedule.learning_rate(step) for step in steps] == [line["lr"] for line in steps.values()]
    assert [schedule.global_batch_size(step) for step in steps] == [8, 8, 8, 16, 16, 16]


def test_values_that_change_by_step() -> None:
    schedule = threefold.Schedule.of(CONFIG)
    assert [schedule.global_batch_size(step) for step in (1, 4, 5, 9)] == [4, 4, 8, 8]
    assert [schedule.sequence_length(step) for step in (1, 4, 5)] == [8, 8, 16]
    assert [round(schedule.learning_rate(step), 12) for step in (1, 2, 4, 8)] == [0.05, 0.1, 0.1, 0.01]
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.ones(1)], "lr_scale": 0.5}], lr=9.0)
    assert schedule.apply(optimizer, 1) == 0.05
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.025]
    with pytest.raises(UserError, match="step is 0 but must be"):
        schedule.learning_rate(0)
    with pytest.raises(UserError, match=r"train.epochs is 2 and a schedule does not read the data"):
        threefold.Schedule.of(CONFIG | {"train": {"epochs": 2}})


def groups_of(named: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The groups, written by hand for torch."""
    last = {name: weight for name, weight in named.items() if name in {f"{each}.down.bias" for each in (1, 2, 3)}}
    second = {name: weight for name, weight in named.items() if name.startswith("2.") and name not in last}
    biases = {name: each for name, each in named.items() if name.endswith(".bias") and name not in {**last, **second}}
    rest = [each for name, each in named.items() if name not in {**last, **second, **biases}]
    return [
        {"params": rest},
        {"params": [*biases.values()], "weight_decay": 0.0},
        {"params": [*second.values()], "lr_scale": 0.5, "betas": (0.5, 0.9)},
        {"params": [*last.values()], "lr_scale": 3.0},
    ]


def batches() -> list[Any]:
    return list(threefold.DistributedDataLoader(data(), 8))[:3]


def plain() -> dict[str, Tensor]:
    """Torch alone, from the same weights."""
    first = threefold.parallelize(layers(), mesh=threefold.init_mesh(), dtype=torch.float64)
    initial = {name: weight.detach() for name, weight in first.named_parameters()}
    model = layers()().double()
    model.load_state_dict(initial | {"4.weight": initial["0.weight"]})
    optimizer = torch.optim.AdamW(groups_of(dict(model.named_parameters())), lr=0.1, weight_decay=0.3, eps=1e-5)
    schedule = threefold.Schedule.of(CONFIG)
    for step, batch in enumerate(batches(), 1):
        optimizer.zero_grad()
        loss_fn(model(batch[0]), batch).backward()
        schedule.apply(optimizer, step)
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def trained(sizes: dict[str, int], options: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """In a layout, with a checkpoint after the second step from which another model goes on."""
    mesh, schedule = threefold.init_mesh(**sizes), threefold.Schedule.of(CONFIG)
    rows = 8 // mesh.dp.size

    def made() -> tuple[Any, Any]:
        model = threefold.parallelize(layers(), mesh=mesh, dtype=torch.float64, **options)
        groups = model.parameter_groups(GROUPS, lr=0.1)
        return model, threefold.distributed_optimizer(
            torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3, eps=1e-5), model
        )

    model, optimizer = made()
    for step, batch in enumerate(batches(), 1):
        if step == 3:
            threefold.save(folder, 2, model=model, optimizer=optimizer)
            model, optimizer = made()
            assert threefold.load(folder, model=model, optimizer=optimizer) == 2
        mine = tuple(part[mesh.dp.index * rows : (mesh.dp.index + 1) * rows] for part in batch)
        model.train_batch(mine, loss_fn)
        schedule.apply(optimizer, step)
        optimizer.step()
    step = model.gradient_step
    seen: Any = SimpleNamespace(optimizer=optimizer, mesh=mesh, model=step.model, parallelism=step.parallelism)
    return whole_tensors(seen, "master")


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 2}, {"zero": 1}),
    ({"tp": 3}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"dp": 2, "pp": 2}, {"micro_batches": 2}),
]


@sweep(("sizes", "options"), LAYOUTS, quick=(0,), slow=(3,))
def test_groups_are_those_of_torch(
    pool: WorkerPool, tmp_path: Path, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    (expected,) = pool.run(1, plain)
    ranks = int(torch.tensor(list(sizes.values())).prod())
    for found in pool.run(ranks, trained, sizes, options, tmp_path):
        assert found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def refusals() -> list[str]:
    model = threefold.parallelize(layers(), mesh=threefold.init_mesh(), verify=False)
    given: list[list[dict[str, Any]]] = [
        [{"match": "*.upp", "lr": 1.0}],
        [{"match": "2.up", "lr": 1.0}, {"match": "2", "lr": 2.0}],
        [{"match": "2", "lr_scale": 2.0}],
        [{"lr": 1.0}],
    ]
    found = []
    for groups in given:
        with pytest.raises(UserError) as error:
            model.parameter_groups(groups)
        found.append(str(error.value))
    return found


def test_groups_that_cannot_be_meant_are_one_sentence(pool: WorkerPool) -> None:
    ((unknown, hidden, unscaled, unmatched),) = pool.run(1, refusals)
    assert unknown.startswith("groups has *.upp as group 1, which matches no weight; the nearest name is ")
    assert "groups has 2.up as group 1, of which later groups match all weights, such as 2.up." in hidden
    assert unscaled == "groups has an lr_scale in group 1, and lr is not given; give the rate that it multiplies."
    assert "but must have a match and options for it" in unmatched
