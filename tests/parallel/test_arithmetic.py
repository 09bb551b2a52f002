"""An arithmetic from outside the package: layers that round their operands, equal in every layout."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tests.support.parity import Case, Trace, global_batch, shard_of, whole_tensors
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.constants import IGNORE_INDEX
from threefold.models.family import make_model, model_plan
from threefold.models.layers.decoder import Linear
from threefold.ops.arithmetic import LayerArithmetic
from threefold.parallel import parallelize
from threefold.parallel.arithmetic import Arithmetic, RankArithmetic
from threefold.train.step import Engine

CASE = Case(dtype="fp64", batch=12, steps=2, clip=0.0)


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


class RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return rounded(grad) @ rounded(weight), grad.flatten(0, -2).t() @ x.flatten(0, -2)


class RoundedLayers(LayerArithmetic):
    replaces_layers = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = RoundedProduct.apply(x, weight)
        return out if bias is None else out + bias

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x, weight)


class RoundedOnRank(RankArithmetic):
    layers = RoundedLayers()


class Rounding(Arithmetic):
    def on_rank(self, mesh: Mesh, micro_batches: int, sequence_parallel: bool, is_custom: bool) -> RankArithmetic:
        return RoundedOnRank()


def in_layout(case: Case, arithmetic: Arithmetic) -> Trace:
    """Train with an arithmetic in place of the config's own."""
    config, chosen = case.config, parallelize.arithmetic_of
    parallelize.arithmetic_of = lambda _: arithmetic  # a config has no setting for those of others
    try:
        mesh, plan = Mesh(Layout.from_config(config.parallel)), model_plan(config.model, case.sequence)
        engine = Engine(partial(make_model, config.model), plan, mesh, config)
    finally:
        parallelize.arithmetic_of = chosen
    trace = Trace(initial=whole_tensors(engine, "master"))
    for step in range(case.steps):
        loss, tokens = engine.compute_gradients(shard_of(case, step, mesh.dp.index), step)
        trace.gradients.append(whole_tensors(engine, "gradient"))
        trace.losses.append(engine.update(loss, tokens, step).loss)
    return trace


def reference(case: Case, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the first step of the unsplit model, computed by torch alone."""
    model = make_model(case.config.model).double()
    model.load_state_dict(initial, strict=False)
    for module in model.modules():
        if isinstance(module, Linear):
            module.arithmetic = RoundedLayers()
    tokens, labels = global_batch(case, 0)
    loss = model(tokens, labels) / (labels != IGNORE_INDEX).sum()
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None} | {
        "loss": loss.detach()
    }


def furthest(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in expected.items())


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (1, 2, 2), (3, 1, 1)])
def test_every_layout_computes_as_one_process(pool: Any, dp: int, tp: int, pp: int) -> None:
    case = CASE.with_layout(dp, tp, pp)
    for found in pool.run(case.world_size, in_layout, case, Rounding()):
        (alone,) = pool.run(1, in_layout, CASE, Rounding())
        expected = reference(CASE, alone.initial)
        assert found.losses[0] == pytest.approx(float(expected.pop("loss")), rel=1e-12)
        assert furthest({name: expected[name] for name in found.gradients[0]}, found.gradients[0]) < 1e-11
        assert found.losses == pytest.approx(alone.losses, rel=1e-12)


def test_it_is_another_arithmetic(pool: Any) -> None:
    (plain,), (other,) = (pool.run(1, in_layout, CASE, each) for each in (Arithmetic(), Rounding()))
    assert furthest(plain.gradients[0], other.gradients[0]) > 1e-4
