"""A pipeline of a list of layers with a tied weight on its first and last stage, against one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

import threefold
from tests.api.layer_list import Mix, data, layers, loss_fn
from threefold.errors import UserError


def losses(sizes: dict[str, int], options: dict[str, Any]) -> list[float]:
    mesh = threefold.init_mesh(**sizes)
    model = threefold.parallelize(layers(), None, mesh, dtype=torch.float64, **options)
    optimizer = threefold.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, clip_grad_norm=1.0)
    found = []
    for batch in threefold.DistributedDataLoader(data(), 8, mesh):
        found += [model.train_batch(batch, loss_fn), optimizer.step()]
    return found


def plain(initial: dict[str, Tensor]) -> list[float]:
    """Torch alone, from the same weights."""
    model = layers()().double()
    model.load_state_dict(initial)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for batch in threefold.DistributedDataLoader(data(), 8):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch)
        loss.backward()
        found += [loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
    return found


def alone() -> tuple[list[float], list[float]]:
    found = losses({}, {})
    again = threefold.parallelize(layers(), None, threefold.init_mesh(), dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in again.named_parameters()}
    return found, plain(weights | {"4.weight": weights["0.weight"]})


def test_the_list_is_one_model_in_every_layout(pool) -> None:
    ((one, torch_alone),) = pool.run(1, alone)
    assert one == pytest.approx(torch_alone, rel=1e-9)
    for found in pool.run(4, losses, {"pp": 2, "tp": 2}, {"micro_batches": 2}):
        assert found == pytest.approx(torch_alone, rel=1e-9)


def default_micro_batches(schedule: str) -> int:
    mesh = threefold.init_mesh(pp=2)
    return threefold.parallelize(layers(), mesh=mesh, schedule=schedule).gradient_step.settings.micro_batches


@pytest.mark.parametrize(("schedule", "fewest"), [("1f1b", 1), ("dualpipev", 4)])
def test_a_pipeline_takes_the_fewest_micro_batches_that_its_schedule_does(pool, schedule: str, fewest: int) -> None:
    assert pool.run(2, default_micro_batches, schedule) == [fewest] * 2


@pytest.mark.parametrize(
    ("given", "tied", "sentence"),
    [
        ([], (), "layers is empty; give the model's layers in order."),
        ([3], (), "layers[0] is 3 but must be a module or a function that makes one."),
        ([lambda: 3], (), "layers[0] makes a int but must make a module; return one."),
        (
            [Mix],
            [("0.weight", "0.up.weight")],
            "tied names '0.weight', which is not a parameter of the model",
        ),
        (
            [Mix],
            [("0.down.weight", "0.up.weight")],
            "tied has '0.down.weight' of the shape [6, 9] and '0.up.weight' of ",
        ),
    ],
)
def test_wrong_lists_are_one_sentence(given: Any, tied: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        threefold.PipelineLayers(given, tied=tied)()
    assert str(caught.value).startswith(sentence)
