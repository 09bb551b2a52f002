"""Cases that tests of several folders use."""

from dataclasses import replace
from typing import Any

from tests.support.parity import Case, departures, in_layout
from threefold.planner.model_size import RankBlock
from threefold.planner.systems import Attention

LLAMA_SIZES = (
    ("architecture", "llama"),
    ("num_key_value_heads", 6),
    ("head_dim", 4),
    ("qkv_bias", True),
    ("qk_norm", True),
    ("sliding_window", 5),
    ("full_attention_layers", 1),
)


LLAMA = Case(
    model=LLAMA_SIZES,
    positions="rope",
    layers=3,
    sequence=12,
    dropout=0.1,
    documents=True,
    tie=False,
    dtype="fp64",
    steps=2,
)


MOE_SIZES: tuple[tuple[str, Any], ...] = (
    ("architecture", "llama"),
    ("num_key_value_heads", 6),
    ("head_dim", 4),
    ("num_experts", 4),
    ("experts_per_token", 2),
    ("expert_ffn_hidden_size", 18),
    ("expert_capacity_factor", 0.8),
    ("shared_expert_ffn_hidden_size", 12),
    ("shared_expert_gate", True),
    ("dense_layers", 1),
    ("router_aux_loss", 0.1),
    ("router_z_loss", 0.01),
)


MOE = Case(model=MOE_SIZES, positions="rope", sequence=12, dropout=0.1, tie=False, dtype="fp64", steps=2)


def over(dp: int, tp: int, pp: int, *settings: tuple[str, Any], ep: int = 1, **changes: Any) -> Case:
    return MOE.with_layout(dp, tp, pp, settings=(("parallel.ep", ep), *settings), **changes)


def with_recompute(case: Case, mode: str, every: int = 1) -> Case:
    return replace(case, settings=(*case.settings, ("train.recompute", mode), ("train.recompute_every", every)))


def sizes(case: Case) -> RankBlock:
    short = case.sequence <= 512 and not case.documents
    attention: Attention = "plain" if case.dtype == "bf16" and short else "fused"
    if case.dropout:
        attention = "dropped" if short else "dropped again"
    itemsize = {"fp64": 8, "fp32": 4}.get(case.dtype, 2)
    return RankBlock(
        samples=case.batch // case.accumulation,
        length=case.sequence,
        hidden=case.heads * case.head_dim,
        heads=case.heads,
        key_heads=case.heads,
        head_dim=case.head_dim,
        ffn=case.ffn,
        itemsize=itemsize,
        hidden_dropout=case.dropout > 0,
        attention=attention,
        documents=case.documents,
        tp=case.tp,
        cp=case.cp,
        sequence_parallel=case.config.parallel.sequence_parallel,
    )


SHARED = (("parallel.sequence_parallel", True),)


def shared(**changes) -> Case:
    """Return a sequence-parallel case: 12 positions divide by 2, 3 and 4 ranks, the vocabulary of 67 by none."""
    return Case(**{"sequence": 12, "settings": SHARED, "layers": 2, **changes})


def case(**changes: object) -> Case:
    """Return a case of 24 positions, which are chunks of 6, 4 and 3 for cp 2, 3 and 4."""
    sizes = {"sequence": 24, "head_dim": 4, "layers": 2, "steps": 2, "batch": 12}
    return Case(**{"dtype": "fp64", "dropout": 0.2, **sizes, **changes})


def check(pool, expected, case: Case) -> None:
    found = departures(expected(case), pool.run(case.world_size, in_layout, case), case)
    assert not found, "\n".join(found[:10])
