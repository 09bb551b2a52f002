"""Half precision in every layout, against one process in fp32."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.parity import Case, in_layout, narrow_departures
from tests.support.sweep import sweep


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2), (1, 4, 1), (1, 1, 3)], ids=str)
def test_fifty_steps_of_fp16_follow_fp32(pool, expected, layout: tuple[int, int, int]) -> None:
    reference = expected(Case(steps=50)).losses
    case = Case(steps=50, dtype="fp16").with_layout(*layout)
    trace = pool.run(case.world_size, in_layout, case)[0]
    assert trace.losses == pytest.approx(reference, rel=1e-2)
    assert all(weight.dtype == torch.float32 for weight in trace.final.values())
    assert trace.losses[-1] < 0.97 * trace.losses[0]


@pytest.mark.parametrize(("dtype", "limit"), [("bf16", 1.5e-2), ("fp16", 3e-3)])
@sweep(
    "layout",
    [
        {},
        {"dp": 2, "tp": 2, "pp": 2},
        {"tp": 2, "cp": 2, "sequence": 12},
        {"pp": 2, "schedule": "zbv"},
        {"dp": 2, "tp": 2, "settings": (("parallel.zero", 2),)},
    ],
    ids=str,
    quick=(1, 3),
)
def test_gradients_are_those_of_fp32_to_what_the_dtype_rounds(
    pool, expected, dtype: str, limit: float, layout: dict[str, Any]
) -> None:
    """Right in absolute size: neither still multiplied by a scale nor divided by one that there never was."""
    case = Case(dtype=dtype, dropout=0.1, layers=4, accumulation=4, steps=1, **layout)
    exact = expected(replace(case, dtype="fp32"))
    assert not narrow_departures(exact, pool.run(case.world_size, in_layout, case), limit)


@sweep("layout", [{}, {"dp": 2, "tp": 2, "pp": 2}, {"dp": 3, "zero": 1}], ids=str, slow=(1, 2))
def test_pure_bf16_follows_fp32(pool, expected, layout: dict[str, int]) -> None:
    """Weights, gradients and Adam's memory in bf16: ten steps within two hundredths; what ranks share, bit-equal."""
    reference = expected(Case(steps=10)).losses
    axes = {"zero": 0, **layout}
    settings = (("precision.master_weights", False), ("parallel.zero", axes.pop("zero")))
    case = Case(steps=10, dtype="bf16", settings=settings, **axes)
    traces = pool.run(case.world_size, in_layout, case)
    assert traces[0].losses == pytest.approx(reference, rel=2e-2)
    for trace in traces:
        for name, weight in trace.final.items():
            assert weight.dtype == torch.bfloat16
            assert all(weight.equal(other.final[name]) for other in traces if name in other.final)
