"""Tests of the tests of recompute, precision and compression: each known silent mistake, put back, must be found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.support import narrow_sum, narrow_sums
from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import Case, Trace, departures, in_layout, narrow_departures, with_recompute
from tests.train.overflows import FP16, check_skipped_by_all, overflowing
from threefold.parallel import gradient_sums
from threefold.parallel import gradients as data
from threefold.random import dropout
from threefold.train import step as engine
from threefold.train import update_rule

pytestmark = pytest.mark.slow  # they test the tests; the quick run has those of the other two files


Mistake = Callable[[], list[Patch]]


def recompute_draws_dropout_anew() -> list[Patch]:
    drop = dropout.drop

    def drawn(x: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        return drop(x, keys + 1 if in_backward else keys, *rest)

    return [(dropout, "drop", drawn)]


def bf16_divided_by_a_scale_it_never_had() -> list[Patch]:
    compute = engine.Engine.compute_gradients

    def divided(self: engine.Engine, *args: Any) -> tuple[Tensor, int]:
        found = compute(self, *args)
        if self.loss_scale is None:
            self.gradients.scale_(1 / self.config.precision.loss_scale)
        return found

    return [(engine.Engine, "compute_gradients", divided)]


def gradients_not_unscaled_before_the_clip() -> list[Patch]:
    scale = data.GradientBuckets.scale_

    def clip_alone(self: data.GradientBuckets, factor: float) -> None:
        if factor != 1 / 65536:
            scale(self, factor)

    return [(data.GradientBuckets, "scale_", clip_alone)]


def logged_loss_still_scaled() -> list[Patch]:
    compute = engine.Engine.compute_gradients

    def scaled(self: engine.Engine, *args: Any) -> tuple[Tensor, int]:
        loss, tokens = compute(self, *args)
        return loss * (self.loss_scale.value if self.loss_scale else 1), tokens

    return [(engine.Engine, "compute_gradients", scaled)]


def gradients_added_up_narrow() -> list[Patch]:
    def narrow(self: Any, leaf: Tensor, gradient: Tensor) -> None:
        if not self.is_set:
            return add(self, leaf, gradient)
        self.view.copy_(self.view.to(leaf.dtype) + gradient)

    add = data._Place.add_
    return [(data._Place, "add_", narrow)]


def overflow_seen_by_one_rank_alone() -> list[Patch]:
    def alone(self: engine.Engine, loss: Tensor) -> tuple[float, float, dict[str, float]]:
        mean, norm, terms = both(self, loss)
        if norm != norm or norm == float("inf"):
            norm = 1.0 + float(self._norm.squared_or_overflow())
        return mean, norm, terms

    both = engine.Engine._loss_and_norm
    return [(engine.Engine, "_loss_and_norm", alone)]


def overflow_of_what_another_rank_answers_for_not_seen() -> list[Patch]:
    return [(engine.GradientNorm, "uncounted_overflow", lambda self: torch.zeros((), dtype=torch.float64))]


def adam_counts_a_skipped_update() -> list[Patch]:
    update = engine.Engine.update

    def counted(self: engine.Engine, *args: Any) -> engine.StepResult:
        result = update(self, *args)
        for _, state, value in self.optimizer.states() if result.skipped else ():
            if state == "step":
                value += 1
        return result

    return [(engine.Engine, "update", counted)]


def update_made_all_the_same() -> list[Patch]:
    update = engine.Engine.update

    def made(self: engine.Engine, *args: Any) -> engine.StepResult:
        result = update(self, *args)
        if result.skipped:
            self.optimizer.step(result.lr)
        return result

    return [(engine.Engine, "update", made)]


def scale_kept_after_an_overflow() -> list[Patch]:
    update = update_rule.LossScale.update
    return [(update_rule.LossScale, "update", lambda self, finite: update(self, finite) if finite else None)]


def test_dropout_of_a_replay(pool, expected) -> None:
    case = with_recompute(Case(dtype="fp64", dropout=0.1, steps=1), "full")
    traces: list[Trace] = pool.run(1, with_mistake, recompute_draws_dropout_anew, in_layout, case)
    assert any("grad" in departure for departure in departures(expected(case), traces, case))


@pytest.mark.parametrize(
    ("mistake", "dtype", "sign"),
    [
        (bf16_divided_by_a_scale_it_never_had, "bf16", "norm"),
        (gradients_not_unscaled_before_the_clip, "fp16", "norm"),
        (logged_loss_still_scaled, "fp16", "loss"),
    ],
)
def test_scales(pool, expected, mistake: Mistake, dtype: str, sign: str) -> None:
    case = Case(dtype=dtype, dropout=0.1, steps=1)
    exact = expected(replace(case, dtype="fp32"))
    found = narrow_departures(exact, pool.run(1, with_mistake, mistake, in_layout, case), 1.5e-2)
    assert any(sign in departure for departure in found), found


def test_narrow_sums_of_micro_batches(pool) -> None:
    (found,) = pool.run(1, with_mistake, gradients_added_up_narrow, narrow_sum)
    assert found.item() != 1000.0


SPLIT, WHOLE = ((0, 1, 1), "blocks.2.mlp.down.weight"), ((0, 1, 0), "blocks.0.attn_norm.weight")


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        (overflow_seen_by_one_rank_alone, SPLIT),
        (overflow_of_what_another_rank_answers_for_not_seen, WHOLE),
        (adam_counts_a_skipped_update, SPLIT),
        (update_made_all_the_same, SPLIT),
        (scale_kept_after_an_overflow, SPLIT),
    ],
)
def test_overflows(pool, mistake: Mistake, where: tuple[tuple[int, ...], str]) -> None:
    case = FP16.with_layout(2, 2, 2)
    ranks = pool.run(8, with_mistake, mistake, overflowing, case, *where, 1, float("inf"))
    with pytest.raises(AssertionError):
        check_skipped_by_all(ranks, 1)


def gradients_not_brought_into_range() -> list[Patch]:
    return [(gradient_sums, "_exponent", lambda flat, axis, tp: None)]


def test_small_gradients_on_a_narrow_wire(pool) -> None:
    ((sums, _), _) = pool.run(2, with_mistake, gradients_not_brought_into_range, narrow_sums, "fp16", [1e-20])
    assert not sums[0].any()  # all lost, where the bound of test_compression allows a rounding
