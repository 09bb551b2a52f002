"""Mixtures of experts: against one process, and against every token through every expert."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.parity import Case, Trace, check, over
from tests.support.sweep import sweep
from threefold.launch.worker_pool import WorkerPool

SHARED = (("parallel.sequence_parallel", True),)


def slow(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


@sweep(
    "case",
    [
        over(2, 1, 1, ep=2),
        over(4, 2, 1, *SHARED, ep=2),
        slow(over(2, 2, 1, ep=2)),
        over(2, 1, 2, ep=2, cp=2),
        slow(over(1, 2, 1, *SHARED, cp=2)),
        over(2, 1, 2, ("parallel.stage_chunks", 2), ep=2, schedule="zero-bubble"),
        slow(over(2, 1, 1, ("train.recompute", "full"), ep=2)),
        over(2, 2, 1, ("parallel.zero", 3)),
        over(4, 2, 1, *SHARED, ("parallel.zero", 3), ep=2),
        slow(over(2, 1, 1, ("parallel.zero", 1), ep=2)),
        slow(over(2, 1, 2, ("parallel.zero", 2), ep=2, cp=2)),
        replace(over(4, 1, 1, ep=4), dtype="fp32"),
        over(4, 1, 1, ("parallel.zero", 3), ("parallel.zero_shards", 2), ep=2),
        slow(over(4, 2, 1, *SHARED, ("parallel.zero", 1), ("parallel.zero_shards", 2), ep=2)),
        slow(over(8, 1, 1, ("parallel.zero", 2), ("parallel.zero_shards", 4), ep=2, batch=16)),
        slow(over(8, 1, 1, ("parallel.zero", 3), ("parallel.zero_shards", 2), ep=4, batch=16)),
        slow(over(4, 1, 1, ("parallel.zero", 2), ("parallel.zero_shards", 2), ep=2, cp=2)),
        slow(over(4, 1, 1, ("parallel.zero", 1), ("parallel.zero_shards", 1), ep=2, cp=2)),
        slow(over(4, 1, 2, ("parallel.zero", 1), ("parallel.zero_shards", 2), ep=2)),
        slow(over(8, 1, 1, ("parallel.zero", 2), ("parallel.zero_shards", 4), ep=2, batch=16, optimizer="muon")),
    ],
    ids=[
        "ep2",
        "ep2-dp4-tp2-shared",
        "ep2-tp2",
        "ep2-pp2-cp2",
        "tp2-cp2-shared",
        "ep2-pp2-zero-bubble",
        "ep2-recompute",
        "zero3-tp2",
        "ep2-dp4-tp2-zero3",
        "ep2-zero1",
        "ep2-pp2-cp2-zero2",
        "ep4-fp32",
        "ep2-dp4-zero3-hybrid",
        "ep2-dp4-tp2-zero1-hybrid",
        "ep2-dp8-zero2-hybrid4",
        "ep4-dp8-zero3-hybrid2",
        "ep2-dp4-cp2-zero2-hybrid",
        "ep2-dp4-cp2-zero1-hybrid1",
        "ep2-dp4-pp2-zero1-hybrid",
        "ep2-dp8-zero2-hybrid4-muon",
    ],
    quick=(0, 3, 12),
    slow=slice(1, None, 2),
)
def test_a_layout_trains_what_one_process_trains(
    pool: WorkerPool, expected: Callable[[Case], Trace], case: Case
) -> None:
    check(pool, expected, case)
