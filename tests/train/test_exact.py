"""An exact run has the same bits in every layout inside its grain."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.exact import CASE, check, check_near_plain, differences, exact_run, slow_but, with_layout
from tests.support.parity import Case, Trace
from threefold.errors import UserError
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
    "looped-bfs": with_layout(CASE, 1, 1, 2, "looped-bfs"),
    "dp 2 looped-bfs": with_layout(CASE, 2, 1, 2, "looped-bfs", micro=4, parallel__zero=2),
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


@pytest.mark.parametrize(
    ("layout", "settings", "error"),
    [
        ((1, 1, 1), {"train__grain_tensor": 3}, "grain_tensor is 3 but .* model.vocab_size 88; use 2"),
        ((1, 1, 1), {"train__grain_tensor": 16}, "grain_tensor is 16 but .* model.vocab_size 88; use 8"),
        ((1, 1, 1), {"train__grain_samples": 6}, "grain_samples is 6 but .* train.global_batch_size 16; use 4"),
        ((8, 1, 1), {"train__grain_samples": 4}, "dp is 8 but must divide train.grain_samples 4; use 4"),
        ((1, 8, 1), {"train__grain_tensor": 2}, "tp is 8 but must divide train.grain_tensor 2, .*; use 2"),
    ],
)
def test_layout_outside_the_grain_is_refused_with_the_nearest_inside(
    layout: tuple[int, int, int], settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        _ = with_layout(CASE, *layout, **settings).config


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 4])
def test_bits_do_not_depend_on_threads(pool: WorkerPool, one_process: Callable[[Case], Trace], threads: int) -> None:
    few = replace(CASE, layers=1, steps=2)  # threads that share a core wait for each other
    expected = one_process(few)
    (found,) = pool.run(1, exact_run, with_layout(few, 1, 1, 1), threads)
    assert not differences(expected, found)[:6]
