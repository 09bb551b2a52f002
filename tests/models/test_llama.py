"""Llama and models like it against one process, in layouts that cut heads, positions and layers."""

from collections.abc import Callable

from tests.support.parity import LLAMA, Case, Trace, check
from tests.support.sweep import sweep
from threefold.verify.worker_pool import WorkerPool

SHARED = (("parallel.sequence_parallel", True),)
RING = (("parallel.cp_method", "ring"),)


@sweep(
    "case",
    [
        LLAMA.with_layout(1, 2, 2, settings=SHARED),
        LLAMA.with_layout(1, 1, 1, cp=3, settings=RING),
    ],
    ids=["tp2-pp2-shared", "ring3"],
    quick=(0,),
)
def test_a_layout_trains_what_one_process_trains(
    pool: WorkerPool, expected: Callable[[Case], Trace], case: Case
) -> None:
    check(pool, expected, case)
