"""Any layout computes what one process computes.

Per parameter: initial weights, each step's gradient before the update, and the weights after the last; and each step's
loss and gradient norm on every rank. The reference is the unsplit model with torch's own loss, clip and optimizer.
"""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from tests.support.layouts import laid_out
from tests.support.parity import Case, check, in_layout
from tests.support.sweep import sweep
from threefold.models.gpt import Activation

LAYOUTS = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 3, 2), (2, 2, 2)]
EIGHT = [(dp, tp, 8 // dp // tp) for dp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if dp * tp <= 8]


def name(layout: tuple[int, int, int]) -> str:
    return "dp{}-tp{}-pp{}".format(*layout)


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.sweep), "fp64"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_layout(pool, expected, layout: tuple[int, int, int], dtype: str) -> None:
    """With dropout, accumulation, uneven masks, 7 layers, a vocabulary of 67."""
    check(pool, expected, Case(layers=7, dropout=0.2, dtype=dtype).with_layout(*layout))


@sweep(
    "changes",
    [
        {"tie": False},
        {"optimizer": "sgd", "dtype": "fp32"},
        {"optimizer": "sgd", "clip": 0.0},
        {"uneven": False},
        {"accumulation": 4},
        {"accumulation": 1},
        {"vocab": 64, "sequence": 8},
    ],
    ids=str,
    quick=(0, 1, 4),
)
def test_variant(pool, expected, changes: dict) -> None:
    check(pool, expected, Case(**{"dtype": "fp64", **changes}).with_layout(2, 2, 2))


def test_a_norm_below_the_limit_clips_nothing(pool, expected) -> None:
    check(pool, expected, Case(dtype="fp64", optimizer="sgd", clip=1e3))


@sweep("activation", get_args(Activation), quick=(4,))
def test_activation_functions_and_dropout_of_embeddings(pool, expected, activation: str) -> None:
    model = (("activation", activation), ("embedding_dropout", 0.4))
    check(pool, expected, Case(dtype="fp64", dropout=0.1, model=model, steps=2).with_layout(2, 2, 2))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
@sweep("pp", [2, 3, 4], quick=(1,), slow=())
def test_schedule(pool, expected, schedule: str, micro_batches: int, pp: int) -> None:
    """Micro-batches fewer than, as many as and more than the stages."""
    case = Case(dtype="fp64", layers=4, accumulation=micro_batches, schedule=schedule, steps=2, dropout=0.1)
    check(pool, expected, case.with_layout(1, 1, pp))


@sweep("layout", EIGHT, ids=name, slow=(1, 5))
def test_every_product_of_eight_ranks_for_ten_steps(pool, expected, layout: tuple[int, int, int]) -> None:
    _, tp, pp = layout
    sizes = {"layers": 8 if pp == 8 else 4, **({"heads": 24, "ffn": 72} if tp == 8 else {})}
    check(pool, expected, Case(dtype="fp64", steps=10, accumulation=3, dropout=0.1, **sizes).with_layout(*layout))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_loss_curve_of_twenty_steps_in_single_precision(pool, expected, tp: int) -> None:
    case = Case(dtype="fp32", steps=20).with_layout(1, tp, 1)
    trace = pool.run(tp, in_layout, case)[0]
    assert trace.losses == pytest.approx(expected(case).losses, rel=1e-5)
    assert trace.losses[-1] < trace.losses[0]


def test_ranks_agree_bit_for_bit(pool) -> None:
    """What several ranks hold is the same bits on all of them after eight steps, tied weights included."""
    case = Case(steps=8, dropout=0.1).with_layout(2, 2, 2)
    traces = pool.run(8, in_layout, case)
    for trace in traces[1:]:
        assert trace.losses == traces[0].losses
        assert trace.norms == traces[0].norms
    for held in {parameter for trace in traces for parameter in trace.final}:
        copies = [trace.final[held] for trace in traces if held in trace.final]
        assert all(copy.equal(copies[0]) for copy in copies)


@pytest.mark.slow
def test_half_precision_follows_single_precision_in_every_layout(pool, expected) -> None:
    """bf16 with fp32 masters: twenty steps stay within a hundredth of one process in fp32."""
    plain = Case(steps=20, sequence=12)
    reference = expected(plain).losses
    for layout in ("dp1", "dp2,tp2,pp2", "tp4 sp", "pp3", "cp2 ring", "tp2,cp2", "dp2,pp2 zero2", "dp2 zero3"):
        case = laid_out(replace(plain, dtype="bf16"), layout)
        trace = pool.run(case.world_size, in_layout, case)[0]
        assert trace.losses == pytest.approx(reference, rel=1e-2)
        assert all(weight.dtype == torch.float32 for weight in trace.final.values())
