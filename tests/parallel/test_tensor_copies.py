"""What every tensor rank holds whole has the same bits on each after some steps, also where shards differ in length.

A sum over three replicas or more is rounded as the order of its additions has it. In gloo's ring that follows from the
place in the buffer and from its size, and the sizes differ where tensor ranks have shards of different lengths.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.parity import Case, make_engine, over, shard_of
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.parallel.gradients import GradientBuckets
from threefold.parallel.parameter import has_uneven_shards, is_split
from threefold.resilience.bit_hash import bit_hash
from threefold.verify.worker_pool import WorkerPool

SMALL = Case(batch=12, layers=1, ffn=12, sequence=63, tie=False, accumulation=1)
"""Its vocabulary divides equally over no tp; many weights are held whole (positions), in reach of what that shifts."""


def zero(stage: int) -> Case:
    """Over sockets: sums in shared memory have the order of the ranks."""
    return replace(SMALL, shared_memory=False, settings=(("parallel.zero", stage),)).with_layout(3, 2, 1)


CASES = {
    "dp3-tp2": SMALL.with_layout(3, 2, 1, accumulation=2),
    "dp4-tp2": SMALL.with_layout(4, 2, 1),
    "cp3-tp2": SMALL.with_layout(1, 2, 1, cp=3, sequence=66),
    "dp2-tp3": SMALL.with_layout(2, 3, 1),
    "dp4-tp2-ep2": replace(over(4, 2, 1, ep=2), dtype="fp32"),
    "dp4-tp2-muon": SMALL.with_layout(4, 2, 1, optimizer="muon"),
    "dp3-tp2-bf16": SMALL.with_layout(3, 2, 1, settings=(("parallel.gradient_compression", "bf16"),)),
    "dp3-tp2-fp16": SMALL.with_layout(3, 2, 1, settings=(("parallel.gradient_compression", "fp16"),)),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
}
QUICK, SLOW = ("dp3-tp2",), ("dp4-tp2-ep2", "dp3-tp2-fp16", "dp3-tp2-bf16", "zero3")


def held_whole(case: Case) -> tuple[tuple[int, int, int], dict[str, int], bool]:
    """Where this rank is but for tp, hashes of what is not split over tp, and whether anything has uneven shards."""
    engine = make_engine(case)
    for step in range(3):
        engine.train_step(shard_of(case, step, engine.mesh.dp.index), step)
    found: dict[str, int] = {}
    for entry in engine.optimizer.entries:
        if not is_split(entry.parameter):
            state = {"gradient": entry.gradient, "weight": entry.master, **engine.optimizer.rule.state(entry)}
            for name, value in state.items():
                found[f"{name} of {entry.name}"] = int(bit_hash(value, engine.mesh.device))
    place = engine.mesh.coordinates
    return (
        (place.dp, place.pp, place.cp),
        found,
        any(has_uneven_shards(entry.parameter) for entry in engine.optimizer.entries),
    )


def marked(name: str) -> Any:
    marks = () if name in QUICK else pytest.mark.slow if name in SLOW else pytest.mark.sweep
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_tensor_ranks_have_the_same_bits(pool: WorkerPool, name: str) -> None:
    case = CASES[name]
    copies: dict[tuple[int, int, int], list[dict[str, int]]] = {}
    for place, found, is_uneven in pool.run(case.world_size, held_whole, case):
        assert is_uneven
        copies.setdefault(place, []).append(found)
    for first, *others in copies.values():
        assert first
        assert len(others) == case.tp - 1
        assert [key for other in others for key in first if first[key] != other[key]] == []


def summed(bucket_bytes: int) -> tuple[int, int, torch.Tensor]:
    """Gradients of random values in buckets, some held whole by the two tensor ranks; the last of two lengths."""
    mesh = Mesh(Layout(dp=4, tp=2))
    whole = [torch.nn.Parameter(torch.zeros(size)) for size in (31, 17, 64)]
    sizes = (40, 30, 20)
    shards = [torch.nn.Parameter(torch.zeros(size // (1 + mesh.tp.index))) for size in sizes]
    leaves = [each for pair in zip(whole, shards, strict=True) for each in pair]
    longest = {leaf: leaf.numel() for leaf in whole} | dict(zip(shards, sizes, strict=True))
    buckets = GradientBuckets(leaves, mesh.dp, torch.float32, bucket_bytes, longest=longest, tp=mesh.tp)
    buckets.begin(None)
    generator = torch.Generator().manual_seed(mesh.dp.index)
    for leaf in whole:
        buckets.add_(leaf, torch.randn(leaf.shape, generator=generator))
    for leaf in shards:
        buckets.add_(leaf, torch.ones(leaf.shape))
    buckets.finish()
    assert all(buckets[leaf].eq(4).all() for leaf in shards)
    return mesh.tp.index, len(buckets), torch.cat([buckets[leaf] for leaf in whole])


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 160])
def test_buckets_have_one_layout(pool: WorkerPool, bucket_bytes: int) -> None:
    """Also their bounds: at 160 bytes one rank's first shard would fill a bucket, and the other's would not."""
    found = pool.run(8, summed, bucket_bytes)
    assert Counter(tp for tp, *_ in found) == {0: 4, 1: 4}
    assert {count for _, count, _ in found} == {1 if bucket_bytes > 160 else found[0][1]}
    assert all(sums.equal(found[0][2]) for *_, sums in found)


def summed_together() -> tuple[int, torch.Tensor]:
    """Over sockets, as the shards of several copies with ZeRO."""
    mesh = Mesh(Layout(dp=4, tp=2), shared_memory=False)
    generator = torch.Generator().manual_seed(mesh.dp.index)
    shard, whole = torch.ones(40 // (1 + mesh.tp.index)), torch.randn(64, generator=generator)
    mesh.dp.all_reduce_together_([shard, whole], in_order=True)
    assert shard.eq(4).all()
    return mesh.tp.index, whole


def test_copies_of_shards_are_summed_in_one_order(pool: WorkerPool) -> None:
    found = pool.run(8, summed_together)
    assert {tp for tp, _ in found} == {0, 1}
    assert all(whole.equal(found[0][1]) for _, whole in found)
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(index)) for index in range(4)]
    assert found[0][1].equal((parts[0] + parts[1]) + (parts[2] + parts[3]))
