"""Low-rank adapters in every layout, against the plain model in one process."""

from dataclasses import replace

import pytest

from tests.support.parity import DEEPSEEK, LLAMA, MOE, Case, check
from tests.support.sweep import sweep

UPDATE = (("adapter.rank", 3), ("adapter.alpha", 7.0))
GPT = Case(dtype="fp64", dropout=0.1, update=UPDATE, sequence=12)
FUSED = replace(LLAMA, update=UPDATE, steps=3)
EXPERTS = replace(MOE, update=UPDATE, steps=3)

LAYOUTS = [
    {"dp": 2, "tp": 2},
    {"tp": 2, "settings": (("parallel.sequence_parallel", True),)},
    {"pp": 3, "accumulation": 3},
    {"pp": 2, "accumulation": 4, "schedule": "interleaved"},
    {"pp": 2, "accumulation": 4, "schedule": "zbv"},
    {"cp": 2, "tp": 2},
    {"dp": 4, "settings": (("parallel.zero", 1),)},
    {"dp": 2, "tp": 2, "settings": (("parallel.zero", 3), ("train.recompute", "full"))},
    {"dp": 2, "tp": 2, "pp": 2, "settings": (("parallel.sequence_parallel", True),)},
    {"tp": 3, "settings": (("train.recompute", "full"),)},
    {"tp": 2, "cp": 2, "settings": (("parallel.sequence_parallel", True), ("parallel.cp_method", "ring"))},
]


@sweep("layout", LAYOUTS, ids=str, quick=(0,))
@pytest.mark.parametrize("case", [GPT, FUSED, EXPERTS], ids=["gpt", "llama", "experts"])
def test_adapters_are_as_in_one_process(pool, expected, case: Case, layout: dict) -> None:
    check(pool, expected, replace(case, **layout))


def with_adapter(case: Case, **settings: object) -> Case:
    """Return a case with other settings of the adapter."""
    return replace(case, update=(*case.update, *((f"adapter.{key}", value) for key, value in settings.items())))


SHARED = replace(FUSED, model=(*FUSED.model, ("num_key_value_heads", 2)), heads=8)
ALL = ("**",)
CASES = {
    "key-value heads that ranks share": (SHARED, {"tp": 4}),
    "shared key-value heads with sequence parallelism": (
        SHARED,
        {"tp": 4, "settings": (("parallel.sequence_parallel", True),)},
    ),
    "queries and gates alone": (
        with_adapter(FUSED, targets=("blocks.*.attn.qkv.query", "blocks.*.mlp.gate_up.gate")),
        {"tp": 2, "dp": 2},
    ),
    "embedding and head": (with_adapter(FUSED, targets=ALL), {"tp": 2, "pp": 2}),
    "embedding and head in chunks": (
        with_adapter(FUSED, targets=ALL),
        {"tp": 3, "settings": (("train.loss_chunk_size", 9), ("parallel.sequence_parallel", True))},
    ),
    "embedding in ZeRO": (with_adapter(FUSED, targets=ALL), {"dp": 2, "tp": 2, "settings": (("parallel.zero", 3),)}),
    "dropout": (with_adapter(FUSED, dropout=0.3), {"dp": 2, "tp": 2}),
    "dropout with sequence parallelism": (
        with_adapter(FUSED, dropout=0.3),
        {"tp": 2, "cp": 2, "settings": (("parallel.sequence_parallel", True), ("train.recompute", "full"))},
    ),
    "dropout of adapters alone": (with_adapter(replace(GPT, dropout=0.0), dropout=0.3), {"dp": 2, "tp": 2}),
    "dropout in pieces": (with_adapter(GPT, dropout=0.3), {"cp": 2, "dp": 2}),
    "dropout in a pipeline": (
        with_adapter(GPT, dropout=0.3),
        {"pp": 2, "tp": 2, "accumulation": 4, "settings": (("train.recompute", "full"),)},
    ),
    "dropout of every layer": (
        with_adapter(EXPERTS, dropout=0.3, targets=("blocks.*.attn.*", "blocks.*.mlp.shared.*", "blocks.*.mlp.router")),
        {"tp": 2, "cp": 2, "settings": (("parallel.sequence_parallel", True),)},
    ),
    "divided experts": (EXPERTS, {"dp": 2, "tp": 2, "settings": (("parallel.ep", 2),)}),
    "divided experts with ZeRO": (EXPERTS, {"dp": 4, "settings": (("parallel.ep", 2), ("parallel.zero", 3))}),
    "divided experts with ZeRO 1": (EXPERTS, {"dp": 4, "settings": (("parallel.ep", 2), ("parallel.zero", 1))}),
    "experts and routers": (
        with_adapter(EXPERTS, targets=ALL),
        {"dp": 2, "tp": 2, "settings": (("parallel.ep", 2), ("parallel.sequence_parallel", True))},
    ),
    "latent attention": (
        replace(DEEPSEEK, update=UPDATE, steps=3),
        {"tp": 2, "cp": 2, "settings": (("parallel.sequence_parallel", True),)},
    ),
    "rank-stabilized": (with_adapter(GPT, rank_stabilized=True), {"tp": 2}),
}


ROWS = ("blocks.**", "head.output")
DORA = {
    "key-value heads that ranks share": (SHARED, {"tp": 4}),
    "queries and gates alone": CASES["queries and gates alone"],
    "head in chunks": (
        with_adapter(FUSED, targets=ROWS),
        {"tp": 3, "settings": (("train.loss_chunk_size", 9), ("parallel.sequence_parallel", True))},
    ),
    "head in a pipeline with ZeRO": (
        with_adapter(FUSED, targets=ROWS),
        {"dp": 2, "pp": 2, "accumulation": 4, "settings": (("parallel.zero", 3),)},
    ),
    "dropout": (with_adapter(GPT, dropout=0.3), {"dp": 2, "tp": 2}),
    "dropout with sequence parallelism": (
        with_adapter(FUSED, dropout=0.3),
        {"tp": 2, "cp": 2, "settings": (("parallel.sequence_parallel", True), ("train.recompute", "full"))},
    ),
    "layers beside experts": (
        with_adapter(EXPERTS, targets=("blocks.*.attn.*", "blocks.*.mlp.shared.*", "blocks.*.mlp.router")),
        {"dp": 2, "tp": 2, "settings": (("parallel.ep", 2), ("parallel.sequence_parallel", True))},
    ),
    "latent attention": CASES["latent attention"],
}


@sweep("layout", LAYOUTS, ids=str, quick=(0,))
@pytest.mark.parametrize("case", [GPT, FUSED], ids=["gpt", "llama"])
def test_magnitudes_are_as_in_one_process(pool, expected, case: Case, layout: dict) -> None:
    check(pool, expected, replace(with_adapter(case, dora=True), **layout))


@sweep("which", DORA, quick=(4,))
def test_magnitudes_of_other_layers_are_as_in_one_process(pool, expected, which: str) -> None:
    case, layout = DORA[which]
    check(pool, expected, replace(with_adapter(case, dora=True), **layout))


@sweep("which", CASES, quick=(0, 6, 11))
def test_adapters_of_other_layers_are_as_in_one_process(pool, expected, which: str) -> None:
    case, layout = CASES[which]
    check(pool, expected, replace(case, **layout))
