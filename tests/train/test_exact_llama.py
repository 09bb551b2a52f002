"""Exact runs of the Llama family, and of every kind of attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.exact import LLAMA, check, check_near_plain, differences, exact_run, slow_but, with_layout
from tests.support.parity import Case, Trace
from threefold.launch.worker_pool import WorkerPool


def llama(**settings: Any) -> Case:
    """Return the case with other settings of the model."""
    return replace(LLAMA, model=tuple((dict(LLAMA.model) | settings).items()))


PLAIN = replace(
    llama(num_key_value_heads=8, sliding_window=0, full_attention_layers=0, rope_scaling="yarn", rope_factor=4.0),
    sequence=33,
    documents=False,
    dropout=0.0,
    tie=True,
)
"""Attention that torch's fused kernel would compute."""

FEW_KEYS = llama(num_key_value_heads=2)
"""Fewer key-value heads than pieces: also one process repeats each for its pieces."""

LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "tp 2": (1, 2, 1, {}),
    "tp 4 sp": (1, 4, 1, {"parallel__sequence_parallel": True, "train__recompute": "selective"}),
    "dp 2 tp 2 pp 2": (2, 2, 2, {"micro": 4}),
    "recompute": (2, 1, 1, {"train__recompute": "full"}),
    "zero-bubble": (1, 2, 2, {"schedule": "zero-bubble", "train__recompute": "selective"}),
}


@pytest.mark.parametrize("name", slow_but(LAYOUTS, sweep=["tp 2", "recompute"]))
def test_bits_are_those_of_one_process(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    dp, tp, pp, settings = LAYOUTS[name]
    check(pool, one_process(LLAMA), with_layout(LLAMA, dp, tp, pp, **settings))


@pytest.mark.parametrize("case", [LLAMA, PLAIN, FEW_KEYS], ids=["masked", "plain", "few keys"])
def test_exact_run_is_the_run_up_to_rounding(
    pool: WorkerPool, one_process: Callable[[Case], Trace], case: Case
) -> None:
    check_near_plain(pool, one_process(case), case)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 8])
def test_bits_of_plain_attention_are_those_of_one_process(
    pool: WorkerPool, one_process: Callable[[Case], Trace], tp: int
) -> None:
    check(pool, one_process(PLAIN), with_layout(PLAIN, 1, tp, 1))


@pytest.mark.parametrize("layout", slow_but([(1, 2, 1), (1, 8, 1), (2, 4, 1)], sweep=[(1, 2, 1)]))
def test_bits_with_key_value_heads_on_several_ranks(
    pool: WorkerPool, one_process: Callable[[Case], Trace], layout: tuple[int, int, int]
) -> None:
    settings: dict[str, Any] = {"parallel__sequence_parallel": True} if layout[0] > 1 else {}
    check(pool, one_process(FEW_KEYS), with_layout(FEW_KEYS, *layout, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "threads"), [(LLAMA, 2), (PLAIN, 4)], ids=["masked", "plain"])
def test_bits_do_not_depend_on_threads(
    pool: WorkerPool, one_process: Callable[[Case], Trace], case: Case, threads: int
) -> None:
    expected = one_process(case)
    (found,) = pool.run(1, exact_run, with_layout(case, 1, 1, 1), threads)
    assert not differences(expected, found)[:6]
