"""Steps of the engine: how often it communicates, what decays, and what stays equal between ranks."""

from collections import Counter

import pytest
import torch

from tests.support.parity import Case, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.parallel.parameter import is_split
from threefold.train.step import Engine
from threefold.verify.worker_pool import WorkerPool


def syncs_of_a_step(case: Case) -> tuple[Counter[tuple[str, str]], int, list[float]]:
    """The collectives of the second step by axis and operation, the number of gradient buckets, and losses."""
    engine = make_engine(case)
    losses = [engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0).loss]
    with engine.mesh.recorder.recording() as events:
        losses.append(engine.train_step(shard_of(case, 1, engine.mesh.dp.index), 1).loss)
    return Counter((event.axis, event.operation) for event in events), len(engine.gradients), losses


@sweep("pp", [1, 2], quick=(1,))
def test_accumulation_syncs_and_clips_once(pool: WorkerPool, pp: int) -> None:
    """However many micro-batches: each bucket and the count of tokens once over dp, loss and norm once over all."""
    seen = []
    for accumulation in (1, 4):
        case = Case().with_layout(2, 1, pp, accumulation=accumulation)
        (counts, buckets, losses), *_ = pool.run(case.world_size, syncs_of_a_step, case)
        assert counts["dp", "all_reduce"] == buckets + 1
        assert counts["world", "all_reduce"] == 1
        seen.append(losses)
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def after_steps(case: Case, steps: int) -> dict[str, bytes]:
    """The bits of each whole (not split) weight of this rank after training."""
    engine = trained(case, steps)
    return {entry.name: bits(entry.leaf) for entry in engine.optimizer.entries if not is_split(entry.parameter)}


def trained(case: Case, steps: int) -> Engine:
    engine = make_engine(case)
    for step in range(steps):
        engine.train_step(shard_of(case, step, engine.mesh.dp.index), step)
    return engine


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@sweep("dtype", ["fp32", "bf16"])
def test_unsplit_weights_stay_bit_equal_in_a_tp_group(pool: WorkerPool, dtype: str) -> None:
    case = Case(layers=2, dropout=0.1, dtype=dtype).with_layout(1, 4, 1)
    first, *others = pool.run(4, after_steps, case, 20)
    assert len(first) == 2 * 6 + 3  # norms and row-parallel biases of each block; positions and the last norm
    assert all(other == first for other in others)


def tied_weight(case: Case, steps: int) -> bytes | None:
    entries = {entry.name: entry for entry in trained(case, steps).optimizer.entries}
    return bits(entries["embed.tokens.weight"].master) if "embed.tokens.weight" in entries else None


@pytest.mark.slow  # `tests/parallel/test_parity.py` has twenty steps of it
def test_tied_weights_stay_bit_equal(pool: WorkerPool) -> None:
    case = Case(layers=3, steps=50).with_layout(2, 1, 3)
    shares = pool.run(6, tied_weight, case, 50)
    held = [share for share in shares if share is not None]
    assert len(held) == 4  # the first and last stage of both replicas
    assert len(set(held)) == 1


def decayed(case: Case) -> set[tuple[str, float]]:
    """By how much an update without gradients shrinks each weight of this rank."""
    engine = make_engine(case)
    for entry in engine.optimizer.entries:
        entry.master.detach().fill_(1.0)
        entry.gradient.zero_()
    engine.optimizer.step(0.5)
    return {(entry.name, round(float(entry.master.detach().flatten()[0]), 6)) for entry in engine.optimizer.entries}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_matrices_decay_and_vectors_do_not(pool: WorkerPool, optimizer: str) -> None:
    case = Case(optimizer=optimizer)
    (one,) = pool.run(1, decayed, case)
    shrunk = {name for name, value in one if value == 0.95}  # 1 − rate · decay
    kept = {name for name, value in one if value == 1.0}
    assert len(shrunk) + len(kept) == len(one)
    assert all(name.endswith(".weight") and "norm" not in name for name in shrunk)
    assert all(name.endswith(".bias") or "norm" in name for name in kept)
    for layout in ((2, 2, 2), (1, 4, 1)):
        split = case.with_layout(*layout)
        assert set().union(*pool.run(split.world_size, decayed, split)) == one
