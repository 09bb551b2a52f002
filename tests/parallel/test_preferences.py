"""The loss of preferences in every layout, against its formula on the plain model in one process."""

from dataclasses import replace

import pytest

from tests.support.parity import LLAMA, MOE, Case, check
from tests.support.sweep import sweep

UPDATE = (("preference.beta", 0.3), ("preference.label_smoothing", 0.1))
GPT = Case(dtype="fp64", documents=True, dropout=0.1, update=UPDATE, sequence=12)
FUSED = replace(LLAMA, update=UPDATE, steps=3)
EXPERTS = replace(MOE, documents=True, update=UPDATE, steps=3)
ADAPTED = replace(FUSED, update=(*UPDATE, ("adapter.rank", 3)))

LAYOUTS = [
    {"cp": 2, "tp": 2},
    {"dp": 2, "tp": 2},
    {"tp": 3, "settings": (("train.loss_chunk_size", 9),)},
    {"tp": 2, "settings": (("parallel.sequence_parallel", True),)},
    {"pp": 3, "accumulation": 3},
    {"pp": 2, "accumulation": 4, "schedule": "interleaved"},
    {"pp": 2, "accumulation": 4, "schedule": "zbv"},
    {"cp": 3, "dp": 1},
    {"tp": 2, "cp": 2, "settings": (("parallel.sequence_parallel", True), ("parallel.cp_method", "ring"))},
    {"dp": 4, "settings": (("parallel.zero", 1),)},
    {"dp": 2, "cp": 2, "settings": (("parallel.zero", 3), ("train.recompute", "full"))},
    {"dp": 2, "tp": 2, "pp": 2, "settings": (("parallel.sequence_parallel", True),)},
    {"pp": 2, "cp": 2, "dp": 2, "accumulation": 4, "settings": (("parallel.zero", 1),)},
]


@sweep("layout", LAYOUTS, ids=str, quick=(0,))
@pytest.mark.parametrize("case", [GPT, FUSED, EXPERTS, ADAPTED], ids=["gpt", "llama", "experts", "adapters"])
def test_preferences_are_as_in_one_process(pool, expected, case: Case, layout: dict) -> None:
    check(pool, expected, replace(case, **layout))


def test_experts_over_ranks(pool, expected) -> None:
    check(pool, expected, replace(EXPERTS, dp=4, settings=(("parallel.ep", 2), ("parallel.zero", 3))))


@pytest.mark.parametrize("layout", [{"cp": 2, "dp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_the_loss_of_ipo(pool, expected, layout: dict) -> None:
    check(pool, expected, replace(FUSED, update=(("preference.beta", 0.2), ("preference.loss", "ipo")), **layout))
