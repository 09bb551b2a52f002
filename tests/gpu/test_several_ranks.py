"""Several ranks that share a GPU, over gloo with copies on the CPU: the layers, streams and schedules of CUDA.

Each layout is compared with one process on the CPU. NCCL refuses several ranks on one GPU.
"""

import pytest

from tests.support.devices import DEVICES, staged_on
from tests.support.parity import Case, departures, in_layout, over
from tests.support.sweep import sweep

GPT = Case(sequence=12, layers=4, dropout=0.1, steps=2, shared_memory=False)


def zero(stage: int) -> tuple[tuple[str, int], ...]:
    return (("parallel.zero", stage),)


LAYOUTS = {
    "dp2": GPT.with_layout(2, 1, 1),
    "tp2": GPT.with_layout(1, 2, 1),
    "pp2": GPT.with_layout(1, 1, 2),
    "cp2": GPT.with_layout(1, 1, 1, cp=2),
    "cp2, ring": GPT.with_layout(1, 1, 1, cp=2, settings=(("parallel.cp_method", "ring"),)),
    "tp2, sequence parallel": GPT.with_layout(1, 2, 1, settings=(("parallel.sequence_parallel", True),)),
    "dp2, ZeRO 1": GPT.with_layout(2, 1, 1, settings=zero(1)),
    "dp2, ZeRO 2": GPT.with_layout(2, 1, 1, settings=zero(2)),
    "dp2, ZeRO 3": GPT.with_layout(2, 1, 1, settings=zero(3)),
    "dp3, ZeRO 3, recompute": GPT.with_layout(3, 1, 1, settings=(*zero(3), ("train.recompute", "full"))),
    "pp2, zbv": GPT.with_layout(1, 1, 2, schedule="zbv", accumulation=4),
    "pp2, interleaved": GPT.with_layout(1, 1, 2, schedule="interleaved"),
    "dp2 tp2": GPT.with_layout(2, 2, 1),
    "dp2 pp2, ZeRO 1": GPT.with_layout(2, 1, 2, settings=zero(1)),
    "mixture, ep2": over(2, 1, 1, ep=2, shared_memory=False, dtype="fp32"),
}


@pytest.mark.parametrize("device", DEVICES)
@sweep("name", LAYOUTS, quick=(8,), slow=(4, 10, 14))
def test_layout(pool, expected, name: str, device: str) -> None:
    case = LAYOUTS[name].with_layout(LAYOUTS[name].dp, LAYOUTS[name].tp, LAYOUTS[name].pp, device=device)
    found = departures(expected(case), pool.run(case.world_size, staged_on, device, in_layout, case), case)
    assert not found, "\n".join(found[:10])
