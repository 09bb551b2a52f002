"""Attention scores with a soft cap and sinks: layouts that cut heads, positions and layers against one process."""

from dataclasses import replace
from typing import Any

from tests.support.parity import LLAMA, OSS_SIZES, Case, check
from tests.support.sweep import sweep

RING = (("parallel.cp_method", "ring"),)
SHARED = (("parallel.sequence_parallel", True),)
SCORES = replace(LLAMA, model=(*LLAMA.model, ("attention_softcap", 0.7), ("attention_sinks", True)))
GPT_OSS = Case(
    model=(
        *OSS_SIZES,
        ("architecture", "gpt_oss"),
        ("qkv_bias", True),
        ("sliding_window", 5),
        ("attention_pattern", "1 sliding : 1 full"),
    ),
    positions="rope",
    sequence=12,
    tie=False,
    dtype="fp64",
    steps=2,
)
PLAIN: dict[str, Any] = {"dropout": 0.0, "documents": False}
LAYOUTS = {
    "tp 2": SCORES.with_layout(1, 2, 1, settings=SHARED, **PLAIN),
    "ring 3": SCORES.with_layout(1, 1, 1, cp=3, settings=RING),
    "tp 2, gathered": SCORES.with_layout(1, 2, 1, cp=2),
    "tp 2, ring, sequence parallel": SCORES.with_layout(1, 2, 1, cp=2, settings=(*RING, *SHARED)),
    "gathered, recomputed": SCORES.with_layout(1, 1, 1, cp=2, settings=(("train.recompute", "selective"),), **PLAIN),
    "pipeline": SCORES.with_layout(1, 1, 2, accumulation=4, documents=False),
    "interleaved": SCORES.with_layout(1, 1, 2, schedule="interleaved", layers=4, accumulation=4),
    "zbv": SCORES.with_layout(1, 1, 2, schedule="zbv", layers=4, accumulation=4, dropout=0.0),
    "zero 3": SCORES.with_layout(2, 1, 1, settings=(("parallel.zero", 3),)),
    "zero 3, tp 2": SCORES.with_layout(2, 2, 1, settings=(("parallel.zero", 3),), dropout=0.0),
    "shared heads": SCORES.with_layout(1, 4, 1, model=(*SCORES.model, ("num_key_value_heads", 2))),
    "dp 2, tp 2, pp 2": SCORES.with_layout(2, 2, 2, settings=(*SHARED, ("parallel.zero", 1))),
    "dp 2, ring, pp 2": SCORES.with_layout(2, 1, 2, cp=2, settings=(*RING, ("train.recompute", "full")), **PLAIN),
    "experts": SCORES.with_layout(
        2,
        1,
        1,
        model=(*SCORES.model, ("num_experts", 4), ("expert_ffn_hidden_size", 18)),
        settings=(("parallel.ep", 2),),
    ),
    "gpt-oss": replace(GPT_OSS, dp=2, tp=2, settings=(("parallel.ep", 2), ("parallel.zero", 1))),
    "gpt-oss, ring, pipeline": replace(GPT_OSS, cp=2, pp=2, settings=RING),
    "compiled": SCORES.with_layout(1, 2, 1, compile=True),
    "fp32": SCORES.with_layout(1, 2, 1, cp=2, settings=RING, dtype="fp32"),
}


@sweep("name", LAYOUTS, quick=(1,), slow=(3, 4, 6, 9))
def test_a_layout_trains_what_one_process_trains(pool, expected, name: str) -> None:
    check(pool, expected, LAYOUTS[name])
