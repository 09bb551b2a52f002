"""Sharded data parallelism: what the replicas share changes no number, and frees the memory that it says."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.parity import Case, Trace, check, departures, in_layout, make_engine, shard_of, whole_tensors
from tests.support.sweep import sweep
from threefold.models.layers.decoder import PositionEmbedding, SampleInfo
from threefold.parallel.parameter import whole
from threefold.parallel.zero import _OverAxis


def zero(stage: int, shards: int | None = None, **changes) -> Case:
    settings = (("parallel.zero", stage), *([("parallel.zero_shards", shards)] if shards else []))
    return Case(**{"dtype": "fp64", "dropout": 0.2, "steps": 2, "settings": settings, **changes})


@sweep("layout", [(2, 1, 1), (3, 2, 1), (2, 1, 2), (2, 2, 2)], ids=str, quick=(3,), slow=(1,))
@sweep("stage", [1, 2, 3], quick=(2,))
def test_layout(pool, expected, stage: int, layout: tuple[int, int, int]) -> None:
    """Three replicas and a vocabulary of 67 rows over two tensor ranks: no cut comes out even."""
    check(pool, expected, zero(stage).with_layout(*layout))


def test_some_ranks_have_nothing(pool, expected) -> None:
    """The table of 13 positions has no row left for the last of eight replicas."""
    check(pool, expected, zero(3, accumulation=1).with_layout(8, 1, 1))


def in_layout_with_dirty_buffers(case: Case) -> Trace:
    """The case where every buffer that shards are gathered into or summed in begins as NaN."""

    def dirty(self: _OverAxis, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(size), torch.nan, dtype=dtype, device=device)

    with patch.object(_OverAxis, "allocate", dirty):
        return in_layout(case)


@sweep(("stage", "layout"), [(1, (3, 2, 1)), (2, (3, 1, 2)), (3, (3, 2, 1)), (3, (5, 1, 1))], ids=str, quick=(2,))
def test_what_pads_a_shard_reaches_no_number(pool, expected, stage: int, layout: tuple[int, int, int]) -> None:
    case = zero(stage, batch=30).with_layout(*layout)
    assert any(weight.shape[0] % case.dp for weight in expected(case).initial.values())  # so shards are padded
    found = departures(expected(case), pool.run(case.world_size, in_layout_with_dirty_buffers, case), case)
    assert not found, "\n".join(found[:10])


@sweep(("stage", "layout"), [(1, (4, 1, 1)), (2, (4, 1, 2)), (3, (4, 2, 1))], ids=str, quick=(2,))
def test_hybrid(pool, expected, stage: int, layout: tuple[int, int, int]) -> None:
    """Two copies, each shared by two neighbours."""
    check(pool, expected, zero(stage, shards=2).with_layout(*layout))


def test_copies_agree_bit_for_bit(pool) -> None:
    case = Case(steps=5, settings=(("parallel.zero", 2), ("parallel.zero_shards", 2))).with_layout(4, 1, 1)
    first, *others = pool.run(4, in_layout, case)
    for trace in others:
        assert (trace.losses, trace.norms) == (first.losses, first.norms)
        assert all(trace.final[name].equal(weight) for name, weight in first.final.items())


def evaluated(case: Case) -> list[float]:
    """Loss of a batch before the first update and after each."""
    engine = make_engine(case)
    batches = [shard_of(case, step, engine.mesh.dp.index) for step in range(case.steps)]
    losses = [engine.evaluate(batches[0])[0]]
    for step, batch in enumerate(batches):
        engine.train_step(batch, step)
        losses.append(engine.evaluate(batches[0])[0])
    return losses


@sweep("stage", [1, 3], quick=(1,))
def test_evaluation_sees_the_updated_weights(pool, stage: int) -> None:
    (alone,) = pool.run(1, evaluated, Case(dtype="fp64"))
    assert len(set(alone)) == len(alone)
    for losses in pool.run(2, evaluated, zero(stage, dp=2, dropout=0.0, steps=3)):
        assert losses == pytest.approx(alone, rel=1e-12)


def evaluated_after_a_restore(case: Case) -> list[float]:
    """Loss of a batch, and again with other weights, as a rollback sets them: without a backward pass between."""
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    before = engine.evaluate(batch)[0]
    with torch.no_grad():
        for entry in engine.optimizer.entries:
            entry.master.mul_(0.5)
    engine.optimizer.restored()
    return [before, engine.evaluate(batch)[0]]


@sweep("stage", [1, 2, 3], quick=(0,))
def test_evaluation_sees_restored_weights(pool, stage: int) -> None:
    (alone,) = pool.run(1, evaluated_after_a_restore, Case(dtype="fp64"))
    assert alone[0] != alone[1]
    for losses in pool.run(2, evaluated_after_a_restore, zero(stage, dp=2, dropout=0.0)):
        assert losses == pytest.approx(alone, rel=1e-12)


def positions_unused_by_the_first(case: Case) -> Tensor:
    engine = make_engine(case)
    used = PositionEmbedding.forward

    def forward(self: PositionEmbedding, x: Tensor, samples: SampleInfo) -> Tensor:
        return x.new_zeros(x.shape[1:]) if engine.mesh.rank == 0 else used(self, x, samples)

    with patch.object(PositionEmbedding, "forward", forward):
        engine.compute_gradients(shard_of(case, 0, engine.mesh.rank), 0)
    return whole_tensors(engine, "gradient")["embed.positions.weight"]


@sweep("stage", [1, 3], quick=(1,))
def test_a_parameter_that_one_replica_did_not_use_is_summed_all_the_same(pool, stage: int) -> None:
    case = Case(dp=2, dtype="fp64", tie=False)
    expected = pool.run(2, positions_unused_by_the_first, case)[0]
    assert expected.abs().max() > 0
    shared = replace(case, settings=(("parallel.zero", stage),))
    for gradient in pool.run(2, positions_unused_by_the_first, shared):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


def joined(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Each weight joined by `whole` and by the test's own arithmetic."""
    engine = make_engine(case)
    expected = whole_tensors(engine, "master")
    return [(whole(entry.stored(entry.master.detach())), expected[entry.name]) for entry in engine.optimizer.entries]


def test_shards_are_joined_where_nothing_divides(pool) -> None:
    for pairs in pool.run(6, joined, zero(3, dp=3, tp=2)):
        assert all(got.equal(expected) for got, expected in pairs)
