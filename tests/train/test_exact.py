"""An exact run has the same bits in every layout inside its grain."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.exact import CASE, check, check_near_plain, differences, exact_run, slow_but, with_layout
from tests.support.parity import Case, Trace
from threefold.launch.worker_pool import WorkerPool

LAYOUTS = {
    "micro-batch": with_layout(CASE, 1, 1, 1, micro=4),
    "recompute": with_layout(CASE, 1, 1, 1, train__recompute="full"),
    "dp 2": with_layout(CASE, 2, 1, 1),
    "dp 8": with_layout(CASE, 8, 1, 1, micro=2),
    "tp 2": with_layout(CASE, 1, 2, 1),
    "tp 8": with_layout(CASE, 1, 8, 1),
    "tp 4 sp": with_layout(CASE, 1, 4, 1, parallel__sequence_parallel=True, train__recompute="selective"),
    "pp 3": with_layout(CASE, 1, 1, 3, micro=2),
    "interleaved": with_layout(CASE, 1, 1, 2, "interleaved"),
    "zero-bubble": with_layout(CASE, 1, 1, 2, "zero-bubble"),
    "zbv": with_layout(CASE, 1, 1, 2, "zbv"),
    "dualpipev": with_layout(CASE, 1, 1, 2, "dualpipev"),
    "dp 2 tp 2 pp 2": with_layout(CASE, 2, 2, 2, micro=4),
    "dp 4 tp 2 sp": with_layout(CASE, 4, 2, 1, parallel__sequence_parallel=True),
}


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "dp 8", "zbv", "dp 2 tp 2 pp 2"))
def test_bits_are_those_of_one_process(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    check(pool, one_process(CASE), LAYOUTS[name])


def test_exact_run_is_the_run_up_to_rounding(pool: WorkerPool, one_process: Callable[[Case], Trace]) -> None:
    check_near_plain(pool, one_process(CASE), CASE)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 4])
def test_bits_do_not_depend_on_threads(pool: WorkerPool, one_process: Callable[[Case], Trace], threads: int) -> None:
    few = replace(CASE, layers=1, steps=2)  # threads that share a core wait for each other
    expected = one_process(few)
    (found,) = pool.run(1, exact_run, with_layout(few, 1, 1, 1), threads)
    assert not differences(expected, found)[:6]
