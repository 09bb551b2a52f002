"""Exact runs on a GPU: ranks that share it over gloo have the bits of one rank on it (not those of a CPU)."""

from dataclasses import replace

import pytest

from tests.support.devices import DEVICES, alone_on, staged_on
from tests.support.exact import CASE, LLAMA, MOE, differences, exact_run, with_layout
from tests.support.parity import Case, Trace
from tests.support.sweep import sweep
from threefold.verify.worker_pool import WorkerPool

LAYOUTS = {
    "micro-batch": with_layout(CASE, 1, 1, 1, micro=4),
    "dp 2, ZeRO 3": with_layout(CASE, 2, 1, 1, parallel__zero=3),
    "tp 2, sequence parallel": with_layout(CASE, 1, 2, 1, parallel__sequence_parallel=True),
    "pp 2, zbv": with_layout(CASE, 1, 1, 2, "zbv"),
    "dp 2, pp 2, bf16": with_layout(replace(CASE, dtype="bf16"), 2, 1, 2, micro=2),
    "llama, tp 2": with_layout(LLAMA, 1, 2, 1),
    "mixture, dp 2, tp 2": with_layout(MOE, 2, 2, 1),
}


@pytest.mark.parametrize("device", DEVICES)
@sweep("name", LAYOUTS, slow=(3, 5))
def test_bits_are_those_of_one_rank(pool: WorkerPool, name: str, device: str) -> None:
    case = replace(LAYOUTS[name], device=device, shared_memory=False)
    one = replace(case.with_layout(1, 1, 1), schedule="1f1b", accumulation=case.batch)
    traces: list[Trace] = pool.run(1, alone_on, device, exact_run, as_one(one))
    for rank, found in enumerate(pool.run(case.world_size, staged_on, device, exact_run, case)):
        assert not differences(traces[0], found)[:6], f"rank {rank} of {case}"


def as_one(case: Case) -> Case:
    """Return a case without what only a layout has."""
    return replace(case, settings=tuple(each for each in case.settings if not each[0].startswith("parallel.")))
