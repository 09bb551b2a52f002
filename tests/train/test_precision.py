"""Fp16 with a loss scale that is the same on all ranks, bf16 with wide masters or without, in every layout."""

from dataclasses import replace
from math import inf, isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.parity import Case, in_layout, make_engine, shard_of, whole_tensors
from tests.support.sweep import sweep
from tests.train.overflows import FP16, check_skipped_by_all, overflowing
from tests.train.support import Run, manifest, steps_of, train_rank
from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.errors import UserError
from threefold.models.layers.decoder import CrossEntropy
from threefold.ops import kernels
from threefold.train.gradient_update import LossScale
from threefold.verify.compare import relative_error

# Stage 0 has the norm that every tensor rank holds whole, stage 1 the split weights of the last block.
PLACES = [
    ((0, 0, 0), "blocks.0.attn.qkv.weight"),
    ((1, 0, 0), "embed.positions.weight"),
    ((0, 1, 0), "blocks.0.attn_norm.weight"),
    ((0, 1, 1), "blocks.2.mlp.down.weight"),
    ((1, 1, 1), "head.norm.bias"),
]


@sweep(("place", "name"), PLACES, ids=str, quick=(0, 3))
def test_an_overflow_on_one_rank_makes_every_rank_skip(pool, place: tuple[int, ...], name: str) -> None:
    """On one replica, one tensor rank or one stage, split weights or whole ones; the next step is made."""
    case = FP16.with_layout(2, 2, 2)
    value = float("nan") if place == (1, 0, 0) else float("inf")
    check_skipped_by_all(pool.run(8, overflowing, case, place, name, 1, value), 1)


@sweep(("layout", "zero"), [((2, 1, 1), 1), ((2, 2, 1), 3)], ids=str, quick=(0,))
def test_an_overflow_in_one_shard_makes_every_rank_skip(pool, layout: tuple[int, int, int], zero: int) -> None:
    case = replace(FP16.with_layout(*layout), settings=(("parallel.zero", zero), ("precision.loss_scale", 2.0**40)))
    ranks = pool.run(case.world_size, losses_and_skips, case, 3)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0] == [(True, 2.0**40), (True, 2.0**39), (True, 2.0**38)]


def losses_and_skips(case: Case, steps: int) -> list[tuple[bool, float | None]]:
    engine = make_engine(case)
    results = [engine.train_step(shard_of(case, step, engine.mesh.dp.index), step) for step in range(steps)]
    return [(result.skipped, result.loss_scale) for result in results]


def test_a_scale_that_is_too_large_falls_until_the_gradients_fit(pool) -> None:
    case = replace(FP16, settings=(("precision.loss_scale", 2.0**26), ("precision.loss_scale_window", 2)))
    ((*steps,),) = pool.run(1, losses_and_skips, case, 24)
    skips = [skipped for skipped, _ in steps]
    assert skips[0]
    assert not all(skips[-4:])
    scales = [scale for _, scale in steps]
    for (skipped, scale), after in zip(steps, scales[1:], strict=False):
        assert after == scale / 2 if skipped else after in (scale, scale * 2)


def test_updates_are_made_with_a_scale(pool, expected) -> None:
    """Two steps move the weights where fp32 moves them."""
    case = replace(FP16, steps=2)
    (start,) = pool.run(1, initial_masters, case)
    ((found,), wide) = pool.run(1, in_layout, case), expected(replace(case, dtype="fp32"))
    for name, weight in wide.final.items():
        assert (found.final[name] - weight).norm() < 0.5 * (weight - start[name]).norm(), name


def refused_step(case: Case) -> tuple[bool, str, float, int]:
    engine = make_engine(case)
    loss, tokens = engine.compute_gradients(shard_of(case, 0, 0), 0)
    result = engine.update(loss, tokens, 0, lambda loss, norm: "a spike")
    assert engine.loss_scale is not None
    return result.skipped, result.reason, engine.loss_scale.value, engine.loss_scale.good_steps


def test_a_step_that_is_refused_for_its_loss_leaves_the_scale(pool) -> None:
    case = replace(FP16, settings=(("precision.loss_scale", 2.0**5),))
    assert pool.run(1, refused_step, case) == [(True, "a spike", 2.0**5, 1)]


def hopeless(case: Case) -> None:
    engine = make_engine(case)
    for entry in engine.optimizer.entries:
        entry.leaf.detach().fill_(torch.inf)
    engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)


def test_what_overflows_unscaled_has_diverged(pool) -> None:
    case = replace(FP16.with_layout(1, 1, 2), settings=(("precision.loss_scale", 1.0),))
    with pytest.raises(Exception, match=r"Training diverged at step 1: the loss is nan .* lower optimizer.lr"):
        pool.run(2, hopeless, case)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_other_precisions_have_no_scale(pool, dtype: str) -> None:
    assert pool.run(1, losses_and_skips, Case(dtype=dtype), 1) == [[(False, None)]]


def test_the_scale_doubles_after_a_window_and_halves_to_a_floor() -> None:
    scale = LossScale(4.0, window=3)
    for expected in (4.0, 4.0, 8.0, 8.0):
        scale.update(finite=True)
        assert scale.value == expected
    scale.update(finite=False)
    assert (scale.value, scale.good_steps) == (4.0, 0)
    for _ in range(3):
        assert not scale.is_least or scale.value == 1.0
        scale.update(finite=False)
    assert scale.value == 1.0
    assert scale.is_least


def test_the_scale_and_its_good_steps_are_restored(pool, small_run: Run, tmp_path: Path) -> None:
    """A scale that doubles after every two good steps, saved after the third: half way to the next doubling."""
    settings = (("precision.loss_scale", 2.0**6), ("precision.loss_scale_window", 2))
    run = small_run.but(dtype="fp16", set=settings)
    pool.run(1, train_rank, run.but(steps=3), tmp_path)
    facts = manifest(tmp_path / "checkpoints" / "step_00000003")
    assert (facts["loss_scale"], facts["good_steps"]) == (2.0**7, 1)
    pool.run(1, train_rank, run.but(steps=5), tmp_path, True)
    scales = [line["loss_scale"] for line in steps_of(tmp_path).values()]
    assert scales == [2.0**6, 2.0**6, 2.0**7, 2.0**7, 2.0**8]


def states_of(case: Case) -> set[torch.dtype]:
    engine = make_engine(case)
    engine.train_step(shard_of(case, 0, 0), 0)
    found = {value.dtype for _, _, value in engine.optimizer.states() if value.dim()}
    return found | {entry.gradient.dtype for entry in engine.optimizer.entries}


def initial_masters(case: Case) -> dict[str, Tensor]:
    return {name: master.clone() for name, master in whole_tensors(make_engine(case), "master").items()}


def test_masters_start_at_their_full_width(pool) -> None:
    """With the numbers of a run in fp32, not those that were rounded for the computation."""
    (wide,), (narrow,) = (pool.run(1, initial_masters, Case(dtype=dtype)) for dtype in ("fp32", "bf16"))
    assert narrow.keys() == wide.keys()
    assert all(narrow[name].equal(wide[name]) for name in wide)


def test_pure_bf16_keeps_nothing_wide(pool) -> None:
    case = Case(dtype="bf16")
    assert pool.run(1, states_of, case) == [{torch.float32}]
    assert pool.run(1, states_of, replace(case, settings=(("precision.master_weights", False),))) == [{torch.bfloat16}]


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        ({"master_weights": False}, "precision.master_weights is false but precision.dtype is fp32 and only bf16"),
        ({"master_weights": False, "dtype": "fp16"}, "master_weights is false but precision.dtype is fp16"),
        ({"dtype": "fp16", "loss_scale": 1000.0}, "loss_scale is 1000.0 but must be a power of two; use 1024"),
    ],
)
def test_what_cannot_be_is_refused(precision: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        resolve(Config.model_validate({"data": {"path": "unused"}, "precision": precision}), 67)


def _error(compute: Any, *inputs: Tensor) -> float:
    """Relative error of the result or an input's gradient in fp16 against fp64 from the same numbers; inf where one is
    not a number."""
    found = []
    for dtype in (torch.float16, torch.float64):
        leaves = [each.half().to(dtype).requires_grad_() for each in inputs]
        out = compute(*leaves)
        weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
        found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    errors = [relative_error(got.double(), exact.double()) for got, exact in zip(*found, strict=True)]
    return max(inf if isnan(error) else error for error in errors)


def test_fp16_on_a_cpu_adds_up_wide() -> None:
    """Products, norms, attention and loss of fp16 numbers: wrong by roundings of the result, not of each addend."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) + 0.1  # of one sign: adding up in fp16 would show

    limit = 4 * torch.finfo(torch.float16).eps
    assert _error(kernels.linear, draw(7, 2000), draw(5, 2000), draw(5)) < limit
    assert _error(lambda x, w, b: F.layer_norm(x, (999,), w, b), draw(9, 999), draw(999), draw(999)) < limit
    assert _error(kernels.causal_attention, *(draw(2, 40, 2, 6) for _ in range(3))) < 2 * limit
    labels = torch.arange(9)
    assert _error(lambda logits: CrossEntropy()(logits * 8, labels).double(), draw(9, 60000)) < limit
    table, ids = torch.zeros(3, 2, dtype=torch.float16, requires_grad=True), torch.zeros(5000, dtype=torch.int64)
    (gradient,) = torch.autograd.grad(kernels.embedding(ids, table).sum(), table)
    assert gradient[0].tolist() == [5000.0, 5000.0]  # in fp16, 2048 + 1 is 2048


def test_places_are_where_the_test_says() -> None:
    assert {Layout(2, 2, 2).rank_of(dp=dp, tp=tp, pp=pp) for (dp, tp, pp), _ in PLACES} == {0, 4, 1, 3, 7}
