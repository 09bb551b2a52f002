"""Llama and models like it against one process, in layouts that cut heads, positions and layers."""

from collections.abc import Callable
from dataclasses import replace

from tests.support.layouts import laid_out
from tests.support.parity import BOTH, LLAMA, MOE, WIDE, Case, Trace, check
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


def pattern(case: Case, **changes: object) -> tuple[tuple[str, object], ...]:
    return tuple((dict(case.model) | changes).items())


SHARED_HEADS = {"num_key_value_heads": 2}  # of which four tensor ranks share each
FOUR = {"attention_pattern": ("full", "sliding", "sliding", "full")}
LONGROPE = replace(
    WIDE,
    model=pattern(
        WIDE,
        rope_scaling="longrope",
        rope_factor=4.0,
        rope_original_positions=11,  # shorter than the sequence, and longer than a rank's part of it
        rope_short_factors=(1.0, 1.5),
        rope_long_factors=(1.7, 4.0),
        sliding_rope_scaling=True,
    ),
)
KINDS: dict[str, tuple[Case, str]] = {
    "wide, cut heads": (WIDE, "tp2"),
    "wide, shared heads": (replace(WIDE, model=pattern(WIDE, **SHARED_HEADS)), "tp4 sp"),
    "wide, mixed": (replace(WIDE, layers=4), "tp2,cp2,pp2 interleaved micro4"),
    "wide, gathered": (WIDE, "cp2"),
    "wide, ring": (WIDE, "cp2 ring"),
    "wide, zbv": (replace(WIDE, layers=4), "tp2,pp2 zbv micro4"),
    "wide, zero": (WIDE, "dp2,tp2 zero3"),
    "wide, fp32": (replace(WIDE, dtype="fp32"), "tp3 sp"),
    "wide, recomputed": (WIDE, "tp2,pp2 selective"),
    "both, cut": (BOTH, "tp2 sp"),
    "both, mixed": (BOTH, "dp2,tp2,pp2"),
    "both, chunks": (BOTH, "tp3 chunk5"),
    "both, chunks of one rank": (BOTH, "dp1 chunk5"),
    "both, ring": (BOTH, "cp2 ring"),
    "both, gathered": (BOTH, "tp2,cp2 sp"),
    "both, zbv": (replace(BOTH, layers=4, model=pattern(BOTH, **FOUR)), "pp2 zbv micro4"),
    "both, zero": (BOTH, "dp4 zero3 shards2 full"),
    "both, fp32": (replace(BOTH, dtype="fp32", steps=1), "tp2,pp2"),
    "experts": (
        replace(MOE, model=pattern(MOE, gate_activation="gelu_tanh", norm_position="both", norm_offset=True)),
        "dp2,tp2 ep2",
    ),
    "longrope, sequence parallel": (LONGROPE, "tp2 sp"),
    "longrope, gathered": (LONGROPE, "tp2,cp2"),
    "longrope, ring": (LONGROPE, "cp2 ring"),
    "longrope, zbv": (replace(LONGROPE, layers=4), "pp2 zbv micro4"),
    "longrope, interleaved": (replace(LONGROPE, layers=4), "pp2 interleaved micro4"),
    "longrope, mixed": (LONGROPE, "dp2,cp2,pp2 zero1 full"),
    "longrope, zero": (LONGROPE, "dp2,tp2 zero3 sp"),
    "longrope, fp32": (replace(LONGROPE, dtype="fp32"), "cp2"),
}


@sweep("name", KINDS, quick=(1, 10), slow=(2, 4, 8, 11, 12, 18, 20, 21, 24))
def test_kinds_of_blocks(pool: WorkerPool, expected: Callable[[Case], Trace], name: str) -> None:
    check(pool, expected, laid_out(*KINDS[name]))
