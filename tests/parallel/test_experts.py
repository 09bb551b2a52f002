"""Mixtures of experts: against one process, and against every token through every expert."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.layouts import laid_out
from tests.support.parity import BIASED_SIZES, MOE, OSS_SIZES, Case, Trace, check, over
from threefold.verify.worker_pool import WorkerPool

SHARED = (("parallel.sequence_parallel", True),)


def slow(case: Case, name: str) -> Any:
    return pytest.param(case, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(over(2, 1, 1, ep=2), id="ep2"),
        slow(over(4, 2, 1, *SHARED, ep=2), "ep2-dp4-tp2-shared"),
        slow(over(2, 2, 1, ep=2), "ep2-tp2"),
        pytest.param(over(2, 1, 2, ep=2, cp=2), id="ep2-pp2-cp2"),
        slow(over(2, 1, 2, ("parallel.stage_chunks", 2), ep=2, schedule="zero-bubble"), "ep2-pp2-zero-bubble"),
        pytest.param(over(4, 1, 1, ("parallel.zero", 3), ("parallel.zero_shards", 2), ep=2), id="ep2-dp4-zero3-hybrid"),
        slow(over(4, 1, 1, ("parallel.zero", 1), ("parallel.zero_shards", 1), ep=2, cp=2), "ep2-dp4-cp2-zero1-hybrid1"),
        slow(
            over(8, 1, 1, ("parallel.zero", 2), ("parallel.zero_shards", 4), ep=2, batch=16, optimizer="muon"),
            "ep2-dp8-zero2-hybrid4-muon",
        ),
    ],
)
def test_a_layout_trains_what_one_process_trains(
    pool: WorkerPool, expected: Callable[[Case], Trace], case: Case
) -> None:
    check(pool, expected, case)


BIASED = replace(MOE, model=BIASED_SIZES, steps=3)


@pytest.mark.parametrize(
    "words",
    [
        "dp2 ep2",
        "tp2 sp",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                "dp2,tp2 zero3",
                "dp2 zero3 ep2 micro4",
                "cp2",
                "cp2 ring",
                "dp2,pp2 ep2 micro4",
                "pp2 interleaved micro4",
                "pp2 zbv micro4",
                "dp2,cp2 zero3 ep2 full",
                "tp2,pp2 sp full micro4",
            )
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["fp64", pytest.param("fp32", marks=pytest.mark.sweep)])
def test_a_layout_routes_by_biases_and_groups_as_one_process_does(
    pool: WorkerPool, expected: Callable[[Case], Trace], words: str, dtype: str
) -> None:
    check(pool, expected, laid_out(replace(BIASED, dtype=dtype), words))


OSS = replace(MOE, model=OSS_SIZES, steps=3)


@pytest.mark.parametrize(
    ("words", "optimizer"),
    [
        ("dp2 ep2", "adamw"),
        ("tp2 sp", "adamw"),
        *(
            pytest.param(words, optimizer, marks=pytest.mark.slow)
            for words, optimizer in (
                ("tp3", "adamw"),
                ("dp2,tp2 ep2", "lion"),
                ("dp4,tp2 zero3 ep2", "muon"),
                ("dp4 zero3 shards2 ep2 micro3", "muon"),
                ("dp2,tp2 zero3", "muon"),
                ("cp2 ring", "adamw"),
                ("dp2,pp2 ep2 zero-bubble micro4", "adamw"),
                ("pp2 zbv micro4", "adamw"),
                ("dp2,cp2 zero3 ep2 full", "adamw"),
            )
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["fp64", pytest.param("fp32", marks=pytest.mark.sweep)])
def test_a_layout_trains_biased_and_limited_experts_as_one_process_does(
    pool: WorkerPool, expected: Callable[[Case], Trace], words: str, optimizer: str, dtype: str
) -> None:
    check(pool, expected, laid_out(replace(OSS, dtype=dtype, optimizer=optimizer), words))
