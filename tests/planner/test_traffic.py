"""The collectives of a training step are, to the byte, those of the formula."""

from collections import defaultdict
from typing import Any
from unittest.mock import patch

from tests.planner.step_traffic import Table, Volume, step_traffic, wire_bytes
from tests.support.parity import Case, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.parallel import gradients as data
from threefold.parallel.parallelize import ChunkSizes

SHARED = (("parallel.sequence_parallel", True),)
ROTARY_SHARED = (*SHARED, ("model.position_embedding", "rope"))
RING = (("parallel.cp_method", "ring"),)
FULL, CORE = (("train.recompute", "full"),), (("train.recompute", "selective"),)
NARROW = (("precision.master_weights", False),)
FROZEN = (("optimizer.frozen", ("embed.positions", "blocks.1", "blocks.*.attn", "blocks.*.mlp.up.weight")),)
EVEN = {"sequence": 12, "layers": 4}


def counted_and_computed(case: Case, bucket_bytes: int | None = None) -> tuple[Table, Table]:
    limit = bucket_bytes or data.BUCKET_BYTES
    with patch.object(data.in_buckets, "__defaults__", (limit,)):
        engine = make_engine(case, ChunkSizes(bucket_bytes=limit))
        with engine.mesh.recorder.recording() as events:
            engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
        counted: Table = defaultdict(dict)
        for event in events:
            before = counted[event.axis].get(event.operation, Volume())
            counted[event.axis][event.operation] = Volume(before.count + 1, before.nbytes + event.nbytes)
        computed = step_traffic(case.config, engine.parallelism.stages, engine.mesh.coordinates)
    return dict(counted), computed


CASES = {
    "one process": Case(),
    "dp": Case(dp=3),
    "tp": Case(tp=3, accumulation=3),
    "tp untied, bf16": Case(tp=2, tie=False, dtype="bf16"),
    "pp": Case(pp=3, accumulation=4, dropout=0.1),
    "pp untied": Case(pp=2, tie=False, schedule="gpipe"),
    "dp tp pp": Case(dp=2, tp=2, pp=2, dtype="fp64"),
    "sequence": Case(tp=3, settings=SHARED, **EVEN),
    "sequence pp bf16": Case(tp=2, pp=2, settings=SHARED, dtype="bf16", **EVEN),
    "sequence dp": Case(dp=2, tp=4, settings=SHARED, dropout=0.1, **EVEN),
    "interleaved": Case(pp=2, tp=2, schedule="interleaved", **EVEN),
    "sequence, zero-bubble": Case(pp=2, tp=2, schedule="zero-bubble", settings=SHARED, **EVEN),
    "zbv": Case(pp=2, dp=2, schedule="zbv", **EVEN, accumulation=4),
    "cp": Case(cp=2, **EVEN),
    "cp rope, sequence": Case(cp=2, tp=2, dp=2, settings=ROTARY_SHARED, head_dim=4, **EVEN),
    "cp pp": Case(cp=3, pp=2, **EVEN, dropout=0.1),
    "cp ring": Case(cp=3, settings=RING, **EVEN),
    "cp ring bf16": Case(cp=2, tp=2, settings=RING, dtype="bf16", **EVEN),
    "zero 1": Case(dp=3, settings=(("parallel.zero", 1),), accumulation=4),
    "zero 2, bf16": Case(dp=2, tp=2, settings=(("parallel.zero", 2),), tie=False, dtype="bf16"),
    "zero 3": Case(dp=3, tp=2, settings=(("parallel.zero", 3),)),
    "zero 3 pp": Case(dp=3, pp=2, settings=(("parallel.zero", 3),), schedule="gpipe", accumulation=4),
    "zero 2 of two copies": Case(dp=4, settings=(("parallel.zero", 2), ("parallel.zero_shards", 2))),
    "zero 1 of two copies, cp": Case(dp=4, cp=2, settings=(("parallel.zero", 1), ("parallel.zero_shards", 2)), **EVEN),
    "recompute": Case(tp=2, pp=2, settings=(*FULL, ("train.recompute_every", 2)), **EVEN),
    "recompute, dropout, sequence": Case(tp=2, settings=(*FULL, *SHARED), dropout=0.1, **EVEN),
    "recompute, sequence, cp": Case(tp=2, cp=2, settings=(*FULL, *SHARED), **EVEN),
    "recompute of the core, cp": Case(cp=2, settings=CORE, **EVEN),
    "recompute of the core, ring": Case(cp=2, settings=(*CORE, *RING), **EVEN),
    "sequence, zero 2": Case(dp=2, tp=2, settings=(*SHARED, ("parallel.zero", 2)), **EVEN),
    "narrow weights, sequence": Case(dp=2, tp=2, dtype="bf16", settings=(*SHARED, *NARROW), **EVEN),
    "fp16": Case(dp=2, tp=2, pp=2, dtype="fp16", settings=SHARED, **EVEN),
    "gradients in fp16": Case(dp=3, settings=(("parallel.gradient_compression", "fp16"),)),
    "gradients of three replicas, tp": Case(dp=3, tp=2),  # with shards of different lengths
    "gradients in fp16, tp": Case(dp=2, tp=2, settings=(("parallel.gradient_compression", "fp16"),)),
    "gradients in bf16": Case(dp=2, cp=2, settings=(("parallel.gradient_compression", "bf16"),), **EVEN),
    "dualpipev": Case(pp=2, schedule="dualpipev", **EVEN, accumulation=4),
    "frozen, zero 1": Case(dp=3, settings=(("parallel.zero", 1),), update=FROZEN),
    "frozen, zero 2, tp": Case(dp=2, tp=2, settings=(("parallel.zero", 2),), update=FROZEN, tie=False, dtype="bf16"),
    "frozen, zero 2 of two copies": Case(
        dp=4, settings=(("parallel.zero", 2), ("parallel.zero_shards", 2)), update=FROZEN, dtype="bf16"
    ),
    "frozen, zero 3": Case(dp=3, settings=(("parallel.zero", 3),), update=FROZEN),
}


def grouped(key_value_heads: int, tp: int, *model: tuple[str, Any], **changes: Any) -> Case:
    """A Llama with 12 heads of width 4 and fewer key-value heads."""
    sizes = (("architecture", "llama"), ("num_key_value_heads", key_value_heads), ("head_dim", 4), *model)
    return Case(**{"positions": "rope", "tie": False, "model": sizes, "tp": tp, **EVEN, **changes})


GROUPED = {
    "kv heads on their own ranks": grouped(4, 2),
    "kv heads on their own ranks, cp, norms of heads": grouped(4, 2, ("qk_norm", True), cp=2, dtype="bf16"),
    "each kv head on two ranks": grouped(2, 4, ("qkv_bias", True)),
    "a kv head on all ranks": grouped(1, 2, ("qk_norm", True), accumulation=3, dropout=0.1),
    "rows that do not divide": grouped(2, 6),
    "repeated, sequence": grouped(2, 4, ("qk_norm", True), settings=SHARED),
    "repeated, cp": grouped(2, 4, cp=2),
    "repeated, ring, zero 2": grouped(1, 2, cp=2, dp=2, settings=(*RING, ("parallel.zero", 2))),
    "repeated, pp, dp": grouped(1, 2, dp=2, pp=2),
    "repeated, recompute": grouped(2, 4, settings=(*FULL, ("train.recompute_every", 2))),
    "repeated, recompute of the core": grouped(1, 2, settings=CORE),
}


@sweep("name", GROUPED, quick=(3,))
def test_grouped_heads(pool, name: str) -> None:
    """Key-value heads fewer than heads; where they are fewer than tensor ranks too, features travel."""
    case = GROUPED[name]
    for counted, computed in pool.run(case.world_size, counted_and_computed, case):
        assert counted == computed


@sweep("name", CASES, quick=(0, 1, 2, 6, 7, 11, 17, 19, 21, 27, 30), slow=slice(0, None, 3))
def test_what_is_counted_is_what_is_computed(pool, name: str) -> None:
    case = CASES[name]
    for counted, computed in pool.run(case.world_size, counted_and_computed, case):
        assert counted == computed


def test_gradients_in_several_buckets(pool) -> None:
    for counted, computed in pool.run(2, counted_and_computed, Case(dp=2), 20_000):
        assert counted == computed
        assert counted["dp"]["all_reduce"].count > 3


def test_bytes_round_a_ring() -> None:
    assert wire_bytes("all_reduce", 1200, 4) == 1800
    assert wire_bytes("all_gather", 1200, 4) == wire_bytes("reduce_scatter", 1200, 4) == 900
    assert wire_bytes("send", 1200, 4) == 1200
    assert wire_bytes("all_reduce", 1200, 1) == 0
