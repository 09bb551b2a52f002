"""µP in every layout: initial weights, logits, scores and learning rates by the width, as in one process."""

from dataclasses import replace
from typing import Any

from tests.support.parity import BIASED_SIZES, LLAMA, MOE, OSS_SIZES, Case, check
from tests.support.sweep import sweep

SHARED = ("parallel.sequence_parallel", True)
GPT = Case(dtype="fp64", steps=4, sequence=12, model=(("width_base", 12),))
"""Three times as wide as its base."""
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 3, "settings": (("parallel.zero", 1),)},
    {"dp": 2, "tp": 2, "settings": (("parallel.zero", 3),)},
    {"tp": 3},
    {"tp": 2, "settings": (SHARED, ("train.recompute", "full"))},
    {"pp": 3},
    {"pp": 2, "schedule": "interleaved", "layers": 4, "accumulation": 4},
    {"pp": 2, "schedule": "zbv", "layers": 4, "accumulation": 4},
    {"cp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "pp": 2},
    {"tp": 2, "settings": (("train.loss_chunk_size", 16),)},
]


@sweep("changes", LAYOUTS, quick=(1,), slow=(3, 5, 8, 9), ids=str)
def test_layouts(pool, expected, changes: dict[str, Any]) -> None:
    check(pool, expected, replace(GPT, **changes))


@sweep(
    ("optimizer", "update"),
    [
        ("sgd", (("optimizer.momentum", 0.9),)),
        ("adam", ()),
        ("lion", (("optimizer.lr", 1e-3),)),
        ("muon", ()),
        ("muon", (("optimizer.lr_scaling", "original"),)),
    ],
    quick=(3,),
    ids=str,
)
def test_optimizers(pool, expected, optimizer: str, update: tuple[Any, ...]) -> None:
    """A llama for Lion, as a key bias's gradient is rounding alone."""
    model = (*LLAMA.model, ("qkv_bias", False), ("width_base", 12))
    case = replace(LLAMA, model=model, optimizer=optimizer, update=update, steps=3, dropout=0.0)
    check(pool, expected, case.with_layout(2, 2, 1, settings=(("parallel.zero", 1),)))


@sweep(
    "sizes",
    [MOE.model, BIASED_SIZES, OSS_SIZES],
    slow=(0, 2),
    ids=["softmax", "biased", "oss"],
)
@sweep("optimizer", ["adamw", "sgd", "muon"], slow=(0, 1), ids=str)
def test_experts(pool, expected, sizes: tuple[Any, ...], optimizer: str) -> None:
    """Router and the gate of the shared expert read the width, and give few features."""
    update = (("optimizer.lr", 0.05),) if optimizer == "sgd" else ()
    case = replace(MOE, model=(*sizes, ("width_base", 12)), dropout=0.0, optimizer=optimizer, update=update, steps=3)
    check(pool, expected, case.with_layout(2, 2, 1, settings=(("parallel.ep", 2),)))


@sweep("changes", [{"dp": 2, "tp": 2}, {"pp": 2}], slow=(0,), ids=str)
def test_with_groups(pool, expected, changes: dict[str, Any]) -> None:
    """A group's factor and decay beside those of µP."""
    groups = (
        (("match", "blocks.**"), ("name", "muon"), ("lr_scale", 0.5), ("eps", 1e-5)),
        (("match", "blocks.*.mlp"), ("lr_scale", 2.0), ("weight_decay", 0.3)),
    )
    check(pool, expected, replace(GPT, groups=groups, **changes))
