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


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "zbv", "dp 2 tp 2 pp 2", sweep=[*LAYOUTS][::2]))
def test_bits_are_those_of_one_process(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    check(pool, one_process(CASE), LAYOUTS[name])


WHOLE_VECTORS = replace(
    CASE, layers=2, head_dim=16, ffn=256, vocab=384, sequence=32, batch=32, accumulation=32, steps=2
)
"""Sizes for which products are computed in batches, in leaves of four samples."""


@pytest.mark.parametrize(
    "layout",
    slow_but([(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 1)], (1, 1, 1), sweep=[(1, 8, 1)]),
)
def test_bits_of_products_in_batches(
    pool: WorkerPool, one_process: Callable[[Case], Trace], layout: tuple[int, int, int]
) -> None:
    assert WHOLE_VECTORS.config.train.grain_leaf == 4
    sequence_parallel = {"parallel__sequence_parallel": layout[1] == 2}
    check_near_plain(pool, one_process(WHOLE_VECTORS), WHOLE_VECTORS)
    check(pool, one_process(WHOLE_VECTORS), with_layout(WHOLE_VECTORS, *layout, micro=2, **sequence_parallel))


def test_exact_run_is_the_run_up_to_rounding(pool: WorkerPool, one_process: Callable[[Case], Trace]) -> None:
    check_near_plain(pool, one_process(CASE), CASE)


@pytest.mark.parametrize(
    ("layout", "settings", "error"),
    [
        ((1, 1, 1), {"train__grain_tensor": 3}, "grain_tensor is 3 but .* model.vocab_size 88; use 2"),
        ((1, 1, 1), {"train__grain_tensor": 16}, "grain_tensor is 16 but .* model.vocab_size 88; use 8"),
        ((1, 1, 1), {"train__grain_samples": 6}, "grain_samples is 6 but .* train.global_batch_size 16; use 4"),
        ((1, 1, 1), {"train__grain_leaf": 3}, "grain_leaf is 3 but .* the samples of a group, 2; use 2"),
        ((1, 1, 1), {"train__grain_leaf": 4}, "grain_leaf is 4 but .* the samples of a group, 2; use 2"),
        ((8, 1, 1), {"train__grain_samples": 4}, "dp is 8 but must divide train.grain_samples 4; use 4"),
        ((1, 8, 1), {"train__grain_tensor": 2}, "tp is 8 but must divide train.grain_tensor 2, .*; use 2"),
    ],
)
def test_layout_outside_the_grain_is_refused_with_the_nearest_inside(
    layout: tuple[int, int, int], settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        _ = with_layout(CASE, *layout, **settings).config


def test_schedule_of_too_few_leaves_is_refused_with_a_leaf_that_works() -> None:
    with pytest.raises(UserError, match=r"runs the 2 leaves of a replica one by one, but .*; use train.grain_leaf 1"):
        _ = with_layout(CASE, 4, 1, 2, "dualpipev").config
    _ = with_layout(CASE, 4, 1, 2, "dualpipev", train__grain_leaf=1).config


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 4])
def test_bits_do_not_depend_on_threads(pool: WorkerPool, one_process: Callable[[Case], Trace], threads: int) -> None:
    few = replace(CASE, layers=1, steps=2)  # threads that share a core wait for each other
    expected = one_process(few)
    (found,) = pool.run(1, exact_run, with_layout(few, 1, 1, 1), threads)
    assert not differences(expected, found)[:6]
