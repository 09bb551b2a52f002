"""The step without a config: batches of any nesting and of changing shapes, one's own loss, and what it refuses."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.custom_models import (
    MaskedModel,
    StreamModel,
    masked_batch,
    masked_loss,
    mean_loss,
    plan_of,
    stream_batch,
)
from tests.support.parity import MOE, Case, make_engine, shard_of, whole_tensors
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import ParallelConfig
from threefold.errors import UserError
from threefold.models.loss_terms import CountedLoss, LossSums, LossTerm
from threefold.models.sharding import Column, ModelPlan, Normal, Replicated, Row
from threefold.parallel.parallelize import TrainingSettings
from threefold.parallel.parameter import offset
from threefold.random.rng import fill_normal_, stream_key
from threefold.train.gradient_update import LossScale
from threefold.train.step import GradientStep
from threefold.verify.compare import relative_error
from threefold.verify.worker_pool import WorkerError


class Flat(nn.Module):
    """Without parameters, so that a stage of it alone has nothing to train."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def network() -> nn.Sequential:
    return nn.Sequential(Flat(), nn.Linear(3, 8), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))


NETWORK = ModelPlan(
    {"**": Replicated(), "1": Column(), "2": Row()}, ("0", "1", "2", "3", "4"), (1.0,) * 5, lambda name: Normal(0.5)
)
DOUBLE = TrainingSettings(seed=3, dtype=torch.float64)


def with_parallel(micro_batches: int = 1, **settings: Any) -> TrainingSettings:
    return replace(DOUBLE, micro_batches=micro_batches, parallel=ParallelConfig(**settings))


def squares(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[1]).square().mean()


def ragged(step: int, dp_index: int) -> tuple[Tensor, Tensor]:
    """Samples of a length that differs by step and replica, and their number by replica."""
    made = torch.Generator().manual_seed(10 * step + dp_index)
    samples, length = 4 + 4 * dp_index, 3 + (step % 2) + 2 * dp_index
    x = torch.randn(samples, length, 3, generator=made, dtype=torch.float64)
    return x, torch.randn(samples, length, 2, generator=made, dtype=torch.float64)


def expected_of(step: int, dp: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model over the samples of all replicas."""
    model = network().double()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            fill_normal_(parameter, 0.5, stream_key("weights", 3, name), tuple(parameter.shape), (0,) * parameter.dim())
    batches = [ragged(step, index) for index in range(dp)]
    total = sum(len(batch[0]) for batch in batches)
    loss = sum(squares(model(batch[0]), batch) * (len(batch[0]) / total) for batch in batches)
    assert isinstance(loss, Tensor)
    loss.backward()
    return loss.item(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def steps_of(layout: Layout, settings: TrainingSettings) -> tuple[list[int], bool]:
    """Four steps and an evaluation against the plain model; returns the metadata objects of each step, and whether this
    rank has weights."""
    mesh = Mesh(layout)
    step = GradientStep(network, NETWORK, mesh, settings)
    objects: list[int] = []
    sent: list[int] = []
    send = dist.send_object_list

    def counted(*args: Any, **options: Any) -> Any:
        sent.append(1)
        return send(*args, **options)

    for number in range(4):
        sent.clear()
        loss, gradients = expected_of(number, layout.dp)
        with patch.object(dist, "send_object_list", counted):
            found = step.train_batch(ragged(number, mesh.dp.index), number, squares)
        objects.append(len(sent))
        assert abs(found.loss - loss) < 1e-12
        assert found.samples == sum(4 + 4 * index for index in range(layout.dp))
        for weight in step.model.weights:
            whole = gradients[weight.name]
            part = tuple(
                slice(at, at + size) for at, size in zip(offset(weight.parameter), weight.leaf.shape, strict=True)
            )
            torch.testing.assert_close(step.gradients[weight.leaf], whole[part], rtol=1e-10, atol=1e-12)
    assert abs(step.eval_batch(ragged(2, mesh.dp.index), squares).loss - expected_of(2, layout.dp)[0]) < 1e-12
    return objects, bool(step.model.weights)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (Layout(dp=2, pp=2, tp=2), replace(DOUBLE, micro_batches=2)),
        (Layout(dp=2, pp=2), with_parallel(micro_batches=4, schedule="zbv", partition="uniform")),
    ],
    ids=["1f1b", "zbv"],
)
def test_shapes_that_change_by_step_and_replica(pool, layout: Layout, settings: TrainingSettings) -> None:
    """Metadata goes over the wire once for each new shape: in the first two steps here."""
    reports = pool.run(layout.world_size, steps_of, layout, settings)
    assert all(objects[2:] == [0, 0] for objects, _ in reports)
    assert all(sum(objects[0] for objects, _ in reports) > 0 for _ in (0,))


def test_a_stage_without_parameters(pool) -> None:
    layout = Layout(pp=4)
    reports = pool.run(4, steps_of, layout, with_parallel(micro_batches=2, partition=(1, 2, 3)))
    assert [has for _, has in reports] == [False, True, True, True]


def evaluated(layout: Layout) -> tuple[LossSums, LossSums]:
    mesh = Mesh(layout)
    settings = TrainingSettings(dtype=torch.float64, micro_batches=2)
    step = GradientStep(MaskedModel, plan_of(3), mesh, settings)
    size = 24 // layout.dp

    def batch(number: int) -> dict[str, Tensor]:
        whole = masked_batch(number)
        return {name: each[mesh.dp.index * size : (mesh.dp.index + 1) * size] for name, each in whole.items()}

    first = step.eval_batch(batch(0), masked_loss)
    return first, first + step.eval_batch(batch(1), masked_loss)


def test_terms_are_sums_over_everything_divided_by_what_they_count(pool) -> None:
    ((one, both),) = pool.run(1, evaluated, Layout())
    for first, summed in pool.run(4, evaluated, Layout(dp=2, pp=2)):
        assert first.terms == pytest.approx(one.terms, rel=1e-12)
        assert summed.loss == pytest.approx(both.loss, rel=1e-12)
        assert summed.counts == both.counts
    assert one.loss == pytest.approx(one.terms["tokens"] + 0.3 * one.terms["size"], rel=1e-12)
    assert both.counts["tokens"] == sum(int((masked_batch(step)["labels"] != -100).sum()) for step in (0, 1))
    assert both.counts["size"] == both.samples == 48


class Unsteady(nn.Module):
    """Gives a second tensor whose shape follows from the values of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x[:, : 1 + int(x[0, 0, 0] > 100)]


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.inner(x) + other.sum()


def unsteady() -> nn.Sequential:
    return nn.Sequential(Unsteady(), Last())


UNSTEADY = ModelPlan({"*": Replicated()}, ("0", "1"), (1.0, 1.0), lambda name: Normal(0.5))


def other_shape() -> None:
    step = GradientStep(unsteady, UNSTEADY, Mesh(Layout(pp=2)), replace(DOUBLE, micro_batches=2))
    x, y = torch.zeros(4, 3, 3, dtype=torch.float64), torch.zeros(4, 3, 2, dtype=torch.float64)
    step.train_batch((x, y), 0, squares)
    x[2:] = 200.0
    step.train_batch((x, y), 1, squares)


def test_another_shape_than_found_names_stage_tensor_and_shape(pool) -> None:
    with pytest.raises(WorkerError, match=r"stage 0 gave activations 1 \[2, 2, 3\] of torch.float64, but \[2, 1, 3\]"):
        pool.run(2, other_shape)


def refused(batch: Any, loss: Callable[..., Any] | None, layout: Layout, settings: TrainingSettings = DOUBLE) -> None:
    step = GradientStep(network, NETWORK, Mesh(layout), settings)
    step.train_batch(batch, 0, loss)


def alone(
    batch: Any, loss: Callable[..., Any] | None, make: Callable[[], nn.Module] = network, plan: ModelPlan = NETWORK
) -> None:
    settings = replace(DOUBLE, micro_batches=3)
    GradientStep(make, plan, Mesh.alone(), settings).train_batch(batch, 0, loss)


X, Y = torch.ones(6, 4, 3, dtype=torch.float64), torch.ones(6, 4, 2, dtype=torch.float64)


def terms(output: Tensor, batch: Any) -> Mapping[str, Any]:
    return {"a": (output - batch[1]).square().sum()}


class Gives(nn.Module):
    """A layer that returns what the next one cannot take."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


def gives() -> nn.Sequential:
    return nn.Sequential(Gives(), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((("a", Y), squares), r"batch\[0\] is a str but must be a tensor, or a tuple, list, dict or NamedTuple"),
        (((X, Y[:5]), squares), r"batch\[1\] has 5 samples but batch\[0\] has 6; dim 0 of each tensor"),
        (((X, Y.sum()), squares), r"batch\[1\] has no dims but dim 0"),
        (((), squares), "The batch has no tensors; give it one"),
        (((X[:4], Y[:4]), squares), "has 4 samples but micro_batches is 3, which must divide them; use 3 samples"),
        (({"y": Y}, squares), "The layer '0' takes 'x' but the batch has 'y'; call the entry as the parameter"),
        (((X, Y), None), "The batch is a tuple without tokens and labels, and there is no loss; give the loss"),
        (((X, Y), lambda out, batch: out), r"returns a tensor \[2, 4, 2\] of torch.float64 but must return a scalar"),
        (((X, Y), lambda out, batch: 3.0), "The loss returns a float but must return a scalar or a dict of terms"),
        (((X, Y), terms), r"returns the terms 'a' but has no counts\(batch\): what a term is divided by must be known"),
        (((X, Y), CountedLoss(terms, lambda batch: {"b": 1})), r"returns 'a' but its counts\(batch\) has 'b'; use the"),
        (
            ((X, Y), CountedLoss(terms, lambda batch: 3)),
            r"counts\(batch\) of the loss returns a int but must return a dict",
        ),
        (((X, Y), CountedLoss(terms, lambda batch: {"a": "3"})), r"returns '3' for 'a' but must return a number"),
        (((X, Y), CountedLoss(terms, lambda batch: {"a": 0})), "The loss counts nothing in the global batch"),
        (
            ((X, Y), CountedLoss(lambda out, batch: {"a": LossTerm(out)}, lambda batch: {"a": 1})),
            r"returns a tensor \[2, 4, 2\] for the term 'a' but must return a scalar tensor, its sum",
        ),
        (((X, Y), squares, gives, UNSTEADY), "The layer '0' returns a dict but must return a tensor or a tuple of"),
    ],
)
def test_wrong_batches_and_losses(call: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        alone(*call)


@pytest.mark.parametrize(
    ("layout", "settings", "message"),
    [
        (Layout(cp=2), DOUBLE, "cp is 2 but a loss function of the user's needs whole sequences; use cp 1"),
        (Layout(tp=2), with_parallel(sequence_parallel=True), "sequence_parallel is true but a loss function"),
        (
            Layout(pp=2),
            with_parallel(schedule="interleaved", micro_batches=5),
            "micro_batches is 5 but the schedule interleaved runs them in 2 equal rounds .*; use 6",
        ),
        (
            Layout(),
            replace(DOUBLE, recompute="full"),
            "recompute is full but the model's plan has no such mode; use none",
        ),
    ],
)
def test_wrong_settings(pool, layout: Layout, settings: TrainingSettings, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(layout.world_size, refused, (X, Y), squares, layout, settings)


def test_a_scalar_is_the_mean_over_samples_whatever_the_micro_batches() -> None:
    losses = []
    for micro_batches in (1, 2, 6):
        settings = replace(DOUBLE, micro_batches=micro_batches)
        step = GradientStep(StreamModel, plan_of(3), Mesh.alone(), settings)
        losses.append(step.train_batch(stream_batch(0), 0, mean_loss).loss)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-12)


def summed(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def scaled_gradients(case: Case) -> list[dict[str, Tensor]]:
    """The gradients of a step without a loss scale, and with one."""
    engine = make_engine(case)
    found = []
    for scale in (1.0, 4096.0):
        engine.loss_scale = LossScale(scale, window=9)
        engine.compute_gradients(shard_of(case, 0, 0), 0)
        found.append({name: gradient.clone() for name, gradient in whole_tensors(engine, "gradient").items()})
    return found


def test_a_loss_scale_changes_no_gradient(pool) -> None:
    """Nor that of the losses that routers add."""
    ((plain, scaled),) = pool.run(1, scaled_gradients, MOE)
    for name, gradient in plain.items():
        assert relative_error(scaled[name], gradient) < 1e-12, name


def test_sums_of_two_batches_are_those_of_both() -> None:
    one, other = LossSums({"a": 2.0}, {"a": 4.0}, {"a": 1}, 3), LossSums({"a": 5.0}, {"a": 10.0}, {"a": 6}, 4)
    assert one + other == LossSums({"a": 7.0}, {"a": 14.0}, {"a": 7}, 7)
    assert (one + other).loss == 2.0
