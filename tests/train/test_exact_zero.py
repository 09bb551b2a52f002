"""An exact run with ZeRO has the bits of one process, whatever its stage and its number of shards."""

from collections.abc import Callable

import pytest

from tests.support.parity import Case, Trace
from tests.train.test_exact import CASE, check, one_process, with_layout  # noqa: F401
from threefold.launch.worker_pool import WorkerPool

SP = {"parallel__sequence_parallel": True}

LAYOUTS = {
    "1 dp 2": with_layout(CASE, 2, 1, 1, parallel__zero=1),
    "2 dp 4": with_layout(CASE, 4, 1, 1, micro=2, parallel__zero=2),
    "3 dp 8": with_layout(CASE, 8, 1, 1, parallel__zero=3),
    "3 dp 3 uneven": with_layout(CASE, 2, 1, 1, parallel__zero=3, train__recompute="full"),
    "1 of 4 over 2": with_layout(CASE, 4, 1, 1, parallel__zero=1, parallel__zero_shards=2),
    "3 of 8 over 2": with_layout(CASE, 8, 1, 1, parallel__zero=3, parallel__zero_shards=2),
    "2 dp 8 over 4": with_layout(CASE, 8, 1, 1, parallel__zero=2, parallel__zero_shards=4),
    "3 dp 2 tp 2": with_layout(CASE, 2, 2, 1, parallel__zero=3),
    "2 dp 2 tp 4 sp": with_layout(CASE, 2, 4, 1, parallel__zero=2, train__recompute="selective", **SP),
    "1 dp 2 pp 2": with_layout(CASE, 2, 1, 2, micro=2, parallel__zero=1),
    "2 dp 2 pp 3": with_layout(CASE, 2, 1, 3, parallel__zero=2),
    "3 dp 2 interleaved": with_layout(CASE, 2, 1, 2, "interleaved", parallel__zero=3),
    "3 dp 2 tp 2 pp 2": with_layout(CASE, 2, 2, 2, parallel__zero=3, train__recompute="full"),
    "2 of 4 over 2 tp 2 sp": with_layout(CASE, 4, 2, 1, parallel__zero=2, parallel__zero_shards=2, **SP),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_are_those_of_one_process(
    pool: WorkerPool,
    one_process: Callable[[Case], Trace],  # noqa: F811
    name: str,
) -> None:
    check(pool, one_process(CASE), LAYOUTS[name])
