"""Wrong calls of the library in a loop of one's own: each is one sentence that says what to write instead."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import threefold
from tests.support.own_models import MaskedModel, masked_batch, masked_loss, plan_of
from threefold.errors import UserError

PLAN = plan_of(2)


def model(**options: Any) -> threefold.DistributedModel:
    return threefold.parallelize(lambda: MaskedModel(2), PLAN, threefold.init_mesh(), **options)


def optimizer(of: threefold.DistributedModel, **options: Any) -> threefold.ModelOptimizer:
    return threefold.distributed_optimizer(torch.optim.SGD(of.parameters(), lr=0.1), of, **options)


def twice() -> None:
    made = model()
    for step in range(2):
        made.train_batch(masked_batch(step), masked_loss)


def step_twice() -> None:
    made = model()
    update = optimizer(made)
    made.train_batch(masked_batch(0), masked_loss)
    update.step()
    update.step()


def diverges() -> None:
    made = model()
    made.train_batch(masked_batch(0), lambda output, batch: output.mean() * torch.inf)
    optimizer(made).step()


def other_parameters() -> None:
    threefold.distributed_optimizer(torch.optim.SGD(MaskedModel(2).parameters(), lr=0.1), model())


def some_parameters() -> None:
    made = model()
    threefold.distributed_optimizer(torch.optim.SGD(list(made.parameters())[:3], lr=0.1), made)


def saved_for_another() -> None:
    made = model()
    threefold.save("unused", 1, model=made, optimizer=optimizer(model()))


def saved_without_state(folder: Path) -> None:
    made = model()
    threefold.save(folder, 1, model=made)
    threefold.load(folder, model=made, optimizer=optimizer(made))


def saved_without_loader(folder: Path) -> None:
    made = model()
    threefold.save(folder, 1, model=made)
    threefold.load(folder, model=made, loader=threefold.DataLoader([1, 2], 1))


def plain_model() -> nn.Module:
    return MaskedModel(2)


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "a model that is made": (
        lambda: threefold.parallelize(plain_model(), PLAN, threefold.init_mesh()),  # type: ignore[arg-type]
        "model is a MaskedModel that is made already, whole, on this rank; give its class or a function that makes it",
    ),
    "no model": (
        lambda: threefold.parallelize(3, PLAN, threefold.init_mesh()),  # type: ignore[arg-type]
        "model is 3 but must be a class or function that makes the model; give that.",
    ),
    "no plan": (
        lambda: threefold.parallelize(plain_model, ["blocks"], threefold.init_mesh()),  # type: ignore[arg-type]
        "plan is a list but must be a Plan, which names the model's layers; make one.",
    ),
    "no mesh": (
        lambda: threefold.parallelize(plain_model, PLAN, "tp2"),  # type: ignore[arg-type]
        "mesh is a str but must be a Mesh; make it with threefold.init_mesh().",
    ),
    "another plan": (
        lambda: threefold.parallelize(plain_model, plan_of(3), threefold.init_mesh()),
        "layers names 'blocks.2', which is no module of the model",
    ),
    "fp16": (
        lambda: model(dtype=torch.float16),
        "dtype is torch.float16, which needs loss scaling; use torch.bfloat16.",
    ),
    "no float": (
        lambda: model(dtype=torch.int64),
        "dtype is torch.int64, which is no float dtype; use torch.bfloat16.",
    ),
    "zero": (lambda: model(zero=4), "zero is 4 but must be 0, 1, 2 or 3; use 1."),
    "zero_shards": (lambda: model(zero=1, zero_shards=2), "zero_shards is 2 but must divide dp 1; use 1."),
    "micro_batches": (
        lambda: model(micro_batches=0),
        "micro_batches is 0 but must be a whole number of at least 1; use 1.",
    ),
    "a batch that does not divide": (
        lambda: model(micro_batches=5).train_batch(masked_batch(0), masked_loss),
        "A replica's batch has 24 samples but micro_batches is 5, which must divide them; use 20 samples.",
    ),
    "a batch of other names": (
        lambda: model().train_batch({"words": torch.ones(2, 7)}, lambda output, batch: output.mean()),
        "The layer 'start' takes 'ids' but the batch has",
    ),
    "a loss that is none": (
        lambda: model().train_batch(masked_batch(0), 0.5),  # type: ignore[arg-type]
        "loss_fn is 0.5 but must be a function of the output and the batch; give one.",
    ),
    "a loss of each sample": (
        lambda: model().train_batch(masked_batch(0), lambda output, batch: output.mean((1, 2))),
        "The loss returns a tensor [24] of torch.float32 but must return a scalar, the mean over the samples",
    ),
    "a loss that is missing": (
        lambda: model().train_batch(masked_batch(0)),
        "The batch is a dict without tokens and labels, and there is no loss; give the loss as a function",
    ),
    "two batches in a row": (twice, "train_batch is called before the optimizer has used the gradients of the batch "),
    "a step before a batch": (
        lambda: optimizer(model()).step(),
        "optimizer.step() is called without gradients; call model.train_batch(batch, loss_fn) first.",
    ),
    "two steps in a row": (step_twice, "optimizer.step() is called without gradients; call model.train_batch("),
    "a gradient that is not finite": (diverges, "The gradient norm of update 1 is nan; lower the learning rate (0.1)"),
    "an optimizer of the plain model": (other_parameters, "optimizer has 20 parameters that are none of the model's"),
    "an optimizer of some parameters": (some_parameters, "optimizer lacks 17 of the model's parameters, such as "),
    "an optimizer class": (
        lambda: threefold.distributed_optimizer(torch.optim.SGD, model()),  # type: ignore[arg-type]
        "optimizer is a type but must be a torch.optim.Optimizer of model.parameters(); make one.",
    ),
    "an optimizer of another model": (
        lambda: threefold.distributed_optimizer(torch.optim.SGD(model().parameters()), plain_model()),  # type: ignore[arg-type]
        "model is a MaskedModel but must be one of threefold.parallelize(); give that.",
    ),
    "an optimizer that computes the loss": (
        lambda: threefold.distributed_optimizer(torch.optim.LBFGS((made := model()).parameters()), made),
        "optimizer is LBFGS, which computes the loss several times in a step; use one that takes gradients",
    ),
    "an optimizer that needs whole weights": (
        lambda: threefold.distributed_optimizer(torch.optim.Adafactor((made := model()).parameters()), made),
        "optimizer is Adafactor, which needs whole weights, and parameters() has this rank's shards; use an ",
    ),
    "a clip of 0": (
        lambda: optimizer(model(), clip_grad_norm=0.0),
        "clip_grad_norm is 0.0 but must be above 0; use None for no limit.",
    ),
    "save a plain model": (
        lambda: threefold.save("unused", 1, model=plain_model()),  # type: ignore[arg-type]
        "model is a MaskedModel but must be one of threefold.parallelize(); give that.",
    ),
    "save torch's optimizer": (
        lambda: threefold.save("unused", 1, model=(made := model()), optimizer=optimizer(made).optimizer),  # type: ignore[arg-type]
        "optimizer is a SGD but must be of threefold.distributed_optimizer(); give that.",
    ),
    "save another's optimizer": (
        saved_for_another,
        "optimizer is of another model; give the model that it was made wi",
    ),
    "save torch's loader": (
        lambda: threefold.save("unused", 1, model=model(), loader=torch.utils.data.DataLoader([1])),  # type: ignore[arg-type]
        "loader is a DataLoader but must be a threefold.DataLoader; give that.",
    ),
    "save a step that is none": (
        lambda: threefold.save("unused", 0.5, model=model()),  # type: ignore[arg-type]
        "step is 0.5 but must be a whole number of at least 0; use 0.",
    ),
    "load from nowhere": (
        lambda: threefold.load("nowhere", model=model()),
        "nowhere has no complete checkpoint; save one with threefold.save().",
    ),
}


def told(name: str) -> str:
    try:
        CALLS[name][0]()
    except UserError as error:
        return str(error)
    return "not refused"


def told_of_all() -> dict[str, str]:
    return {name: told(name) for name in CALLS}


@pytest.fixture(scope="module")
def sentences(pool) -> dict[str, str]:
    return pool.run(1, told_of_all)[0]


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_one_sentence(sentences: dict[str, str], name: str) -> None:
    found = sentences[name]
    assert found.startswith(CALLS[name][1])
    assert found != "not refused"
    assert found.endswith(".")
    assert "\n" not in found
    assert "Traceback" not in found


def loads(folder: Path) -> list[str]:
    found = []
    for number, call in enumerate((saved_without_state, saved_without_loader)):
        try:
            call(folder / str(number))
        except UserError as error:
            found.append(str(error).partition(" has ")[2])
    return found


def test_a_checkpoint_without_what_is_asked_for(pool, tmp_path: Path) -> None:
    assert pool.run(1, loads, tmp_path)[0] == [
        "no optimizer state; save it with optimizer=, or load it without.",
        "no place in the data; save it with loader=, or load it without.",
    ]


def too_few_samples() -> str:
    mesh: Any = SimpleNamespace(dp=SimpleNamespace(index=0, size=2))
    try:
        threefold.DataLoader([1, 2, 3], 4, mesh, drop_last=True)
    except UserError as error:
        return str(error)
    return "not refused"


def test_a_data_set_that_is_too_small() -> None:
    assert too_few_samples().startswith("The data set has 3 samples, fewer than global_batch_size 4")
