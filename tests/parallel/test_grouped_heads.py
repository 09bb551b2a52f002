"""Fewer key-value heads than tensor ranks: what one process computes, whatever the ranks share."""

from typing import Any

import pytest

from tests.support.parity import Case, check, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.comm.axis import Event
from threefold.parallel.leaf import local
from threefold.parallel.shard_modules import GroupedHeadsLinear


def grouped(key_value_heads: int, tp: int, *model: tuple[str, Any], **changes: Any) -> Case:
    """12 heads of width 4, biases, norms of heads, and dropout, whose masks follow from the head."""
    sizes = (("architecture", "llama"), ("num_key_value_heads", key_value_heads), ("head_dim", 4))
    more = (("qkv_bias", True), ("qk_norm", True), *model)
    given = {"positions": "rope", "sequence": 12, "tie": False, "dtype": "fp64", "steps": 2, "dropout": 0.1}
    return Case(**{**given, "model": (*sizes, *more), "tp": tp, **changes})


SHARED = (("parallel.sequence_parallel", True),)
EXPERTS = (("num_experts", 4), ("experts_per_token", 2), ("expert_ffn_hidden_size", 18))
CASES = {
    "tp 2, kv 1": grouped(1, 2),
    "tp 4, kv 2": grouped(2, 4),
    "tp 4, kv 1": grouped(1, 4),
    "rows that do not divide: tp 3, kv 1": grouped(1, 3),  # 56 rows: 19, 19, 18
    "rows that end inside a unit: tp 6, kv 2": grouped(2, 6),  # 64 rows: five times 11, and 9; units of 32
    "tp 6, kv 3": grouped(3, 6),
    "fp32": grouped(2, 4, dtype="fp32"),
    "sequence parallel": grouped(2, 4, settings=SHARED),
    "sequence parallel, uneven": grouped(1, 3, settings=SHARED),
    "pipeline": grouped(1, 2, pp=2, layers=4),
    "deferred weight gradients": grouped(
        1, 2, pp=2, layers=4, schedule="zero-bubble", settings=(("parallel.stage_chunks", 1),), accumulation=4
    ),
    "zero 1": grouped(2, 4, dp=2, settings=(("parallel.zero", 1),)),
    "zero 3": grouped(1, 3, dp=2, settings=(("parallel.zero", 3),)),
    "hybrid zero": grouped(1, 2, dp=4, settings=(("parallel.zero", 2), ("parallel.zero_shards", 2))),
    "context": grouped(2, 4, cp=2),
    "ring": grouped(1, 2, cp=2, settings=(("parallel.cp_method", "ring"),)),
    "recomputed": grouped(2, 4, settings=(("train.recompute", "full"),)),
    "core recomputed": grouped(1, 2, settings=(("train.recompute", "selective"),)),
    "window, documents": grouped(2, 4, ("sliding_window", 5), documents=True),
    "window inside a context chunk": grouped(2, 1, ("sliding_window", 2), cp=2),
    "experts": grouped(1, 2, *EXPERTS, dp=2, settings=(("parallel.ep", 2),)),
    "muon": grouped(2, 4, optimizer="muon"),
}


@sweep("name", CASES, quick=(1, 3, 19), slow=slice(0, None, 4))
def test_gradients_and_steps(pool, expected, name: str) -> None:
    check(pool, expected, CASES[name])


def stored_and_sent(case: Case) -> tuple[int, list[Event]]:
    """The elements of the weight of a block's queries, keys and values that this rank stores, and what a step sends."""
    engine = make_engine(case)
    (stage,) = engine.stages
    layer = stage.get_submodule("blocks.0.attn.qkv")
    assert isinstance(layer, GroupedHeadsLinear)
    with engine.mesh.recorder.recording() as events:
        engine.compute_gradients(shard_of(case, 0, 0), 0)
    return local(layer.weight).numel(), [event for event in events if event.axis == "tp shares"]


def test_a_weight_is_stored_once_and_only_features_travel(pool) -> None:
    """To the ranks of a head alone: per block and micro-batch a gather and its adjoint of one group's features."""
    case = grouped(2, 4, layers=2, dropout=0.0, accumulation=3)
    found = pool.run(4, stored_and_sent, case)
    assert sum(stored for stored, _ in found) == (12 + 2 * 2) * 4 * 36
    features = case.batch // 3 * case.sequence * (6 + 2) * 4 * 8  # of a group of six heads, in fp64
    for _, events in found:
        operations = [event.operation for event in events]
        assert operations.count("all_gather") == operations.count("reduce_scatter") == 2 * 3
        assert {event.nbytes for event in events} == {features}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_whole_heads_on_each_rank_need_nothing_of_it(pool, size: int) -> None:
    expected = "Linear" if size == 1 else "ColumnParallelLinear"
    assert pool.run(size, kinds, grouped(4, size, layers=1)) == [{expected}] * size


def kinds(case: Case) -> set[str]:
    (stage,) = make_engine(case).stages
    return {type(stage.get_submodule("blocks.0.attn.qkv")).__name__}
