"""Exact runs on processors whose kernels misbehave: their bits are those of one process by construction."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.support.exact import CASE, LLAMA, MOE, differences, exact_run, with_layout
from tests.support.kernels import KERNELS, with_kernel
from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import Case
from tests.support.sweep import sweep
from threefold.exact.products import PRODUCTS
from threefold.verify.worker_pool import WorkerPool

SP: dict[str, Any] = {"parallel__sequence_parallel": True}
GPT = replace(CASE, layers=1, steps=2)
CONTEXT = replace(GPT, sequence=32, settings=(*CASE.settings, ("train.grain_context", 4)))
NARROW = replace(GPT, dtype="bf16")
WINDOWS = replace(LLAMA, layers=1)
MIXTURE = replace(MOE, layers=1)
NARROW_MIXTURE = replace(MIXTURE, dtype="bf16")

LAYOUTS: dict[str, tuple[Case, Case]] = {
    "tp 2": (GPT, with_layout(GPT, 1, 2, 1)),
    "dp 2 tp 4 sp": (GPT, with_layout(GPT, 2, 4, 1, **SP)),
    "cp 2": (CONTEXT, replace(with_layout(CONTEXT, 1, 1, 1), cp=2)),
    "cp 4 tp 2 sp": (CONTEXT, replace(with_layout(CONTEXT, 1, 2, 1, **SP), cp=4)),
    "llama tp 4": (WINDOWS, with_layout(WINDOWS, 1, 4, 1)),
    "bf16 tp 2 sp": (NARROW, with_layout(NARROW, 1, 2, 1, **SP)),
    "bf16 tp 8": (NARROW, with_layout(NARROW, 1, 8, 1)),
    "mixture tp 2 sp": (MIXTURE, with_layout(MIXTURE, 1, 2, 1, **SP)),
    "mixture bf16 tp 8": (NARROW_MIXTURE, with_layout(NARROW_MIXTURE, 1, 8, 1)),
    "mixture bf16 ep 2 tp 2 sp": (NARROW_MIXTURE, with_layout(NARROW_MIXTURE, 2, 2, 1, parallel__ep=2, **SP)),
}


def refused(mistake: Callable[[], list[Patch]], case: Case, threads: int) -> tuple[Any, int]:
    """Train, and return the trace and the number of trials that found other bits."""
    before = PRODUCTS.refused
    trace = with_mistake(mistake, exact_run, case, threads)
    return trace, PRODUCTS.refused - before


@sweep("name", LAYOUTS, slow=(0, 2, 5, 7))
@sweep("kernel", KERNELS, slow=(0, 2))
def test_bits_are_those_of_one_process_whatever_the_kernel(pool: WorkerPool, kernel: str, name: str) -> None:
    (alone, case), mistake = LAYOUTS[name], partial(with_kernel, kernel)
    ((expected, _),) = pool.run(1, refused, mistake, with_layout(alone, 1, 1, 1), 1)
    for rank, (found, trials) in enumerate(pool.run(case.world_size, refused, mistake, case, 2)):
        assert not differences(expected, found)[:6], f"rank {rank}"
        assert trials
