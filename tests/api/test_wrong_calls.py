"""Wrong calls of the library in a loop of one's own: each is one sentence that says what to write instead."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import threefold
from tests.support.custom_models import MaskedModel, masked_batch, masked_loss, plan_of
from tests.support.sentences import sentence

PLAN = plan_of(2)


def model(**options: Any) -> threefold.types.DistributedModel:
    return threefold.parallelize(lambda: MaskedModel(2), PLAN, threefold.init_mesh(), **options)


def optimizer(of: threefold.types.DistributedModel, **options: Any) -> threefold.types.ModelOptimizer:
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


def stepped_already() -> None:
    made = model()
    adafactor = torch.optim.Adafactor(made.parameters())
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    adafactor.step()
    threefold.distributed_optimizer(adafactor, made)


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
    threefold.load(folder, model=made, loader=threefold.DistributedDataLoader([1, 2], 1))


def plain_model() -> nn.Module:
    return MaskedModel(2)


LAYERS = (threefold.ColumnParallelLinear, threefold.RowParallelLinear, threefold.VocabParallelEmbedding)
CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "a model that is made": (
        lambda: threefold.parallelize(plain_model(), PLAN, threefold.init_mesh()),  # type: ignore[arg-type]
        "model is a MaskedModel that already exists whole on this rank; give its class or a function that makes it",
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
        "layers names 'blocks.2', which is not a module of the model",
    ),
    "a model without a plan": (
        lambda: threefold.parallelize(lambda: MaskedModel(2), mesh=threefold.init_mesh()),
        "plan is missing and <lambda> has none; give plan=threefold.Plan(…), which threefold.inspect proposes, or ",
    ),
    "a mesh for a plan": (
        lambda: threefold.parallelize(MaskedModel, threefold.init_mesh()),  # type: ignore[arg-type]
        "plan is a Mesh but must be a Plan; where the model has its own, give mesh by name: mesh=mesh.",
    ),
    "an argument that the model does not take": (
        lambda: threefold.parallelize(MaskedModel, PLAN, arguments={"block": 2}),
        "arguments has 'block', which MaskedModel does not take; the nearest is 'blocks'.",
    ),
    "an argument that inspect does not know": (
        lambda: threefold.inspect(MaskedModel, PLAN, arguments={"block": 2}),
        "arguments has 'block', which MaskedModel does not take; the nearest is 'blocks'.",
    ),
    "a missing argument of the model": (
        lambda: threefold.parallelize(nn.Linear, PLAN, arguments={"in_features": 2}),
        "Linear needs the argument out_features; give arguments={'out_features': …}.",
    ),
    "a precision that there is none of": (
        lambda: model(precision="bf61"),
        "precision is 'bf61' but must be one of fp32, bf16, fp16; the nearest is bf16.",
    ),
    "two precisions": (
        lambda: model(precision="bf16", dtype=torch.float16),
        "dtype is torch.float16 and precision is 'bf16'; leave one of the two out.",
    ),
    "a dtype as text": (
        lambda: model(dtype="fp16"),
        "dtype is 'fp16' but must be a dtype of torch; use torch.bfloat16.",
    ),
    "a layout that is not the world's": (
        lambda: threefold.init_mesh(dp=2),
        "The layout dp 2 · tp 1 · pp 1 needs 2 ranks but the world has 1; set dp to 1 or start 2 ranks.",
    ),
    "a mesh of another layout": (
        lambda: threefold.Mesh(threefold.types.Layout(dp=3)),
        "The layout dp 3 · tp 1 · pp 1 needs 3 ranks but the world has 1; set dp to 1 or start 3 ranks.",
    ),
    "a mesh for an axis": (
        lambda: threefold.ColumnParallelLinear(4, 8, threefold.init_mesh()),  # type: ignore[arg-type]
        "axis is a Mesh but must be an axis of a mesh; use mesh.tp of mesh = threefold.init_mesh(tp=2), say.",
    ),
    "a size that is none": (
        lambda: threefold.VocabParallelEmbedding(4.5, 8, threefold.init_mesh().tp),  # type: ignore[arg-type]
        "num_embeddings is 4.5 but must be a whole number of at least 0; use num_embeddings=1.",
    ),
    "an output that is always gathered": (
        lambda: threefold.RowParallelLinear(4, 8, threefold.init_mesh().tp, gather_output=True),
        "RowParallelLinear has no gather_output: its output is always whole; for an input that is split already, use ",
    ),
    **{
        f"a {layer.__name__} without an axis": (
            lambda layer=layer: layer(4, 8),
            f"{layer.__name__} lacks axis; use mesh.tp of mesh = threefold.init_mesh(tp=2), say.",
        )
        for layer in LAYERS
    },
    **{
        f"{layer.__name__} with {name}": (
            lambda layer=layer, name=name: layer(4, 8, threefold.init_mesh().tp, **{name: None}),
            f"{layer.__name__} has no {name}: {instead}",
        )
        for layer in LAYERS
        for name, instead in {
            "has_bias": "use bias.",
            "init_method": "use weight_init.",
            "skip_bias_add": "it returns the output alone, with its bias; use bias=False and add a bias of your own.",
            "mp_group": "use axis.",
        }.items()
    },
    "a size and an axis too many": (
        lambda: threefold.ColumnParallelLinear(4, 8, threefold.init_mesh().tp, True),
        "ColumnParallelLinear has 3 arguments without a name (in_features, out_features, axis) but got 4, or one of "
        "them by its name too; name those after axis.",
    ),
    "a layer without a size": (
        lambda: threefold.RowParallelLinear(4, axis=threefold.init_mesh().tp),
        "RowParallelLinear lacks out_features; give out_features=1, say.",
    ),
    "a layer that is cut already in a plan's model": (
        lambda: threefold.parallelize(
            lambda: nn.Sequential(threefold.ColumnParallelLinear(4, 8, threefold.init_mesh().tp)),
            threefold.Plan(layers=["0"], shard={"0": threefold.Replicated()}),
        ),
        "'0' is a ColumnParallelLinear, which is cut already, but a plan cuts the model of one device; use nn.Linear "
        "with Column() in the plan, or train the model as it is, in your own loop or with threefold.prepare.",
    ),
    "an argument that a layer has not": (
        lambda: threefold.RowParallelLinear(4, 8, threefold.init_mesh().tp, input_parallel=True),
        "RowParallelLinear has no argument 'input_parallel'; the nearest is 'input_is_parallel'.",
    ),
    "a splitter over a mesh": (
        lambda: threefold.compat.paddle.Splitter(threefold.init_mesh()),  # type: ignore[arg-type]
        "over is a Mesh but must be an axis of a mesh; use mesh.tp of mesh = threefold.init_mesh(tp=2), say.",
    ),
    "a split without weights": (
        lambda: threefold.compat.paddle.split(torch.ones(2, 4), (4, 8), "linear", axis=1),
        "split is called outside of a block that has its weights; make `weights = Splitter(mesh.tp)` once",
    ),
    "a split by other ranks": (
        lambda: threefold.compat.paddle.Splitter(threefold.init_mesh().tp)(
            torch.ones(2, 4), (4, 8), "linear", axis=1, num_partitions=2, name="up"
        ),
        "num_partitions is 2 but tp has 1 ranks; use 1.",
    ),
    "no float": (
        lambda: model(dtype=torch.int64),
        "dtype is torch.int64, which is not a float dtype; use torch.bfloat16.",
    ),
    "zero": (lambda: model(zero=4), "zero is 4 but must be 0, 1, 2 or 3; use 1."),
    "zero_shards": (lambda: model(zero=1, zero_shards=2), "zero_shards is 2 but must divide dp 1; use 1."),
    "compression": (
        lambda: model(gradient_compression="fp8"),
        "gradient_compression is 'fp8' but must be one of none, fp16, bf16; the nearest is fp16.",
    ),
    "compression with ZeRO": (
        lambda: model(gradient_compression="bf16", zero=1),
        "gradient_compression is 'bf16' but zero is 1, which would also add the micro-batches up in 16 bits; use "
        "gradient_compression='none' or zero=0.",
    ),
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
    "an optimizer that needs whole weights and has stepped": (
        stepped_already,
        "optimizer is Adafactor, which needs whole weights, and has a state of this rank's shards already; pass it ",
    ),
    "a parameter of two optimizers": (
        lambda: threefold.distributed_optimizer(
            [torch.optim.SGD((made := model()).parameters()), torch.optim.SGD(made.parameters())], made
        ),
        "Two optimizers have the parameter 'blocks.0.down.bias'; leave it to one of them.",
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
        "loader is a DataLoader but must be a threefold.DistributedDataLoader; give that.",
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


def told_of_all() -> dict[str, str]:
    return {name: sentence(call) for name, (call, _) in CALLS.items()}


@pytest.fixture(scope="module")
def sentences(pool) -> dict[str, str]:
    return pool.run(1, told_of_all)[0]


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_one_sentence(sentences: dict[str, str], name: str) -> None:
    found = sentences[name]
    assert found.startswith(CALLS[name][1])
    assert found.endswith(".")
    assert "\n" not in found
    assert "Traceback" not in found


def loads(folder: Path) -> list[str]:
    calls = enumerate((saved_without_state, saved_without_loader))
    return [sentence(call, folder / str(number)).partition(" has ")[2] for number, call in calls]


def test_a_checkpoint_without_what_is_asked_for(pool, tmp_path: Path) -> None:
    assert pool.run(1, loads, tmp_path)[0] == [
        "no optimizer state; save it with optimizer=, or load it without.",
        "no place in the data; save it with loader=, or load it without.",
    ]


def test_a_data_set_that_is_too_small() -> None:
    mesh: Any = SimpleNamespace(dp=SimpleNamespace(index=0, size=2), world=SimpleNamespace(size=1))
    said = sentence(threefold.DistributedDataLoader, [1, 2, 3], 4, mesh, drop_last=True)
    assert said.startswith("The data set has 3 samples, fewer than global_batch_size 4")
