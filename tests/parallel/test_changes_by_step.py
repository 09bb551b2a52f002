"""What changes during a run changes alike in every layout: each step equals that of one process."""

from typing import Any

import pytest

from tests.support.parity import Case, check
from tests.support.sweep import sweep
from threefold.config.by_step import NumberByStep

BATCHES = NumberByStep({0: 12, 1: 24, 3: 6})
CASE = Case(batch=BATCHES, accumulation=4, steps=4, dropout=0.1, dtype="fp64")


@sweep(
    "changes",
    [
        {"dp": 2, "accumulation": 4},
        {"tp": 2},
        {"pp": 2, "schedule": "1f1b"},
        {"cp": 2, "sequence": 12},
        {"dp": 3, "tp": 2, "accumulation": 4},
        {"dp": 2, "pp": 2, "cp": 2, "sequence": 12, "accumulation": 4},
        {"pp": 2, "schedule": "zbv"},
        {"pp": 2, "schedule": "interleaved", "accumulation": 8},
        {"dp": 2, "settings": (("parallel.zero", 3),)},
    ],
    ids=str,
    quick=(2,),
    slow=(0, 1, 3, 5, 6),
)
def test_the_global_batch_size(pool, expected, changes: dict[str, Any]) -> None:
    check(pool, expected, Case(**{**vars(CASE), **changes}))


@pytest.mark.slow
def test_the_global_batch_size_in_single_precision(pool, expected) -> None:
    check(pool, expected, Case(**{**vars(CASE), "dtype": "fp32"}).with_layout(2, 2, 1))


LENGTHS = Case(
    sequence=NumberByStep({0: 8, 1: 24, 3: 12}), batch=12, accumulation=2, steps=4, dropout=0.1, dtype="fp64"
)


@sweep(
    "changes",
    [
        {"dp": 2},
        {"pp": 2, "schedule": "1f1b"},
        {"cp": 2},
        {"tp": 2, "settings": (("parallel.sequence_parallel", True),)},
        {"dp": 2, "pp": 2, "cp": 2},
        {"pp": 2, "schedule": "zbv"},
        {"tp": 2, "pp": 2, "settings": (("parallel.sequence_parallel", True),)},
        {"dp": 2, "documents": True, "positions": "rope", "head_dim": 4},
    ],
    ids=str,
    quick=(1,),
    slow=(2, 3, 4, 6),
)
def test_the_sequence_length(pool, expected, changes: dict[str, Any]) -> None:
    check(pool, expected, Case(**{**vars(LENGTHS), **changes}))


@pytest.mark.slow
def test_both_at_once(pool, expected) -> None:
    changes = {"batch": NumberByStep({0: 24, 2: 12}), "dp": 2, "pp": 2, "accumulation": 4}
    check(pool, expected, Case(**{**vars(LENGTHS), **changes}))
