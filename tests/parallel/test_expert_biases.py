"""Expert biases that follow the load: the same bits in every layout, and nothing but training steps moves them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import threefold as t3
from tests.support.layouts import laid_out
from tests.support.parity import BIASED_SIZES, MOE, Case, CaseRows, global_batch, make_engine, shard_of
from threefold.checkpoint.errors import MODEL
from threefold.checkpoint.folder import path_of
from threefold.checkpoint.manifest import Facts, read_manifest
from threefold.checkpoint.save import save_checkpoint
from threefold.checkpoint.tensors import stored_tensors
from threefold.comm.mesh import Event
from threefold.constants import IGNORE_INDEX
from threefold.models.family import make_model, model_plan
from threefold.parallel.running_statistics import stored_buffers
from threefold.train.state import checkpoint_tensors, restore_engine
from threefold.train.step import Engine
from threefold.verify.reference import OneProcess
from threefold.verify.worker_pool import WorkerPool

STEPS = 50
# Small updates, so that rounding, which grows from step to step, leaves every choice of an expert as it is.
SMALL: dict[str, Any] = {"heads": 4, "ffn": 20, "batch": 16, "update": (("optimizer.lr", 1e-4),), "dropout": 0.0}
SIZES = tuple({**dict(BIASED_SIZES), "num_key_value_heads": 2, "expert_ffn_hidden_size": 6}.items())
CASE = replace(MOE, model=SIZES, **SMALL)
SOFTMAX = replace(
    CASE, model=tuple({**dict(SIZES), "router": "softmax", "router_groups": 0, "router_groups_chosen": 1}.items())
)

Biases = dict[str, Tensor]


def biases_of(engine: Engine) -> Biases:
    return {name: value.clone() for name, value in stored_buffers(engine.stages).items()}


def trained(case: Case, steps: int) -> Biases:
    engine = make_engine(case)
    for step in range(steps):
        engine.train_step(shard_of(case, step % 4, engine.mesh.dp.index), step)
    return biases_of(engine)


def in_one_process(case: Case, steps: int) -> Biases:
    config = case.config
    run = OneProcess(partial(make_model, config.model), model_plan(config.model, case.sequence), config)
    for step in range(steps):
        run.step(CaseRows(case).batch(config, step % 4), step)
    return run.trace.buffers[-1]


@pytest.fixture(scope="module")
def reference(pool: WorkerPool) -> Callable[[Case, int], Biases]:
    return cache(lambda case, steps: pool.run(1, in_one_process, case, steps)[0])


def require_bits(pool: WorkerPool, expected: Biases, case: Case, steps: int) -> None:
    assert len(expected) == case.layers - 1
    assert all(value.any() and value.dtype == torch.float32 for value in expected.values())
    found: Biases = {}
    for biases in pool.run(case.world_size, trained, case, steps):
        for name, value in biases.items():
            assert value.equal(expected[name]), name
            assert value.dtype == torch.float32
        found |= biases
    assert found.keys() == expected.keys()


QUICK = ("dp2 ep2", "tp2 sp", "pp2 full micro4")
WIDER = ("tp2", "cp2", "micro8", "dp2 full micro4", "dp2,pp2 ep2 zbv micro4")
WIDEST = ("dp2,cp2 zero3 ep2", "dp2,tp2 sp zero1 micro4", "dp4 ep4 zero3 sockets")


@pytest.mark.parametrize("words", QUICK)
def test_biases_have_the_bits_of_one_process(pool: WorkerPool, reference: Any, words: str) -> None:
    require_bits(pool, reference(CASE.unsplit, 4), laid_out(CASE, words), 4)


@pytest.mark.slow
@pytest.mark.parametrize("words", [*QUICK, *WIDER, *(pytest.param(each, marks=pytest.mark.sweep) for each in WIDEST)])
def test_biases_have_the_bits_of_one_process_after_fifty_steps(pool: WorkerPool, reference: Any, words: str) -> None:
    require_bits(pool, reference(CASE.unsplit, STEPS), laid_out(CASE, words), STEPS)


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "words"), [(replace(CASE, dtype="fp32"), "dp2,tp2 sp ep2"), (SOFTMAX, "dp2,cp2 ep2")])
def test_so_do_those_of_fp32_and_of_a_softmax(pool: WorkerPool, reference: Any, case: Case, words: str) -> None:
    require_bits(pool, reference(case.unsplit, STEPS), laid_out(case, words), STEPS)


def counted(case: Case) -> Tensor:
    engine = make_engine(case)
    engine.compute_gradients(shard_of(case, 0, engine.mesh.dp.index), 0)
    assert engine.biases is not None
    return engine.biases.counts.sum(1)


@pytest.mark.parametrize("words", ["dp2 full micro4", "tp2"])
def test_each_token_counts_once(pool: WorkerPool, words: str) -> None:
    """Recomputed or not, on tensor ranks that all route it, and if its label counts."""
    _, labels = global_batch(CASE, 0)
    each = int((labels != IGNORE_INDEX).sum()) * 2
    for counts in pool.run(2, counted, laid_out(CASE, words)):
        assert counts.tolist() == [0, 0, each, each, 0]  # the embedding and a dense layer, two mixtures, the head


def moved_by(case: Case) -> dict[str, bool]:
    """Whether evaluating, computing gradients twice, skipping an update and making one has moved the biases."""
    engine = make_engine(case)
    batch, moved, before = shard_of(case, 0, engine.mesh.dp.index), {}, biases_of(engine)

    def note(what: str) -> None:
        moved[what] = any(not value.equal(before[name]) for name, value in biases_of(engine).items())

    engine.train_step(batch, 0)
    once = biases_of(engine)
    before = once
    engine.evaluate(batch)
    note("evaluation")
    loss, tokens = engine.compute_gradients(batch, 1)
    loss, tokens = engine.compute_gradients(batch, 1)
    note("gradients")
    engine.update(loss, tokens, 1, refuses=lambda loss, norm: "so")
    note("refused")
    loss, tokens = engine.compute_gradients(batch, 1)
    for entry in engine.optimizer.entries:
        entry.gradient.fill_(inf)
    engine.update(loss, tokens, 1)
    note("overflow")
    engine.train_step(batch, 1)
    note("update")
    return moved


def test_updates_alone_move_biases(pool: WorkerPool) -> None:
    """With fp16's loss scale, which skips a step that overflows."""
    (moved,) = pool.run(1, moved_by, replace(CASE, dtype="fp16"))
    assert moved == {"evaluation": False, "gradients": False, "refused": False, "overflow": False, "update": True}


def recorded(case: Case) -> list[Event]:
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    engine.train_step(batch, 0)
    with engine.mesh.recorder.recording() as events:
        engine.train_step(batch, 0)
    return [event for event in events if event.axis == "world"]


def test_one_reduction_for_all_layers(pool: WorkerPool) -> None:
    still = replace(CASE, model=tuple((name, 0.0 if name == "router_bias_rate" else value) for name, value in SIZES))
    case = laid_out(CASE, "dp2 ep2")
    with_counts, *_ = pool.run(2, recorded, case)
    without, *_ = pool.run(2, recorded, laid_out(still, "dp2 ep2"))
    assert len(with_counts) == len(without) + 1


def saved(case: Case, folder: Path) -> Biases:
    engine = make_engine(case)
    for step in range(2):
        engine.train_step(shard_of(case, step, engine.mesh.dp.index), step)
    facts = Facts(2, 2 * case.batch, 11, None, None, 0, 0)
    save_checkpoint(folder, facts, checkpoint_tensors(engine), {}, engine.mesh.world)
    return biases_of(engine)


def resumed(case: Case, folder: Path) -> tuple[Biases, Biases]:
    """Biases of a checkpoint, and those two steps later."""
    engine = make_engine(case)
    restore_engine(engine, read_manifest(path_of(folder, 2)))
    restored = biases_of(engine)
    for step in range(2, 4):
        engine.train_step(shard_of(case, step, engine.mesh.dp.index), step)
    return restored, biases_of(engine)


def test_a_checkpoint_has_biases_for_every_layout(pool: WorkerPool, reference: Any, tmp_path: Path) -> None:
    stored = {
        name: value for part in pool.run(2, saved, laid_out(CASE, "pp2"), tmp_path) for name, value in part.items()
    }
    dtypes = {name: dtype for name, (_, dtype) in stored_tensors(path_of(tmp_path, 2)).items() if "routing" in name}
    assert dtypes == {MODEL + name: torch.float32 for name in stored}
    for restored, later in pool.run(2, resumed, laid_out(CASE, "dp2 ep2"), tmp_path):
        assert all(value.equal(stored[name]) for name, value in restored.items())
        assert all(value.equal(later[name]) for name, value in reference(CASE.unsplit, 4).items())


def by_hand(case: Case, steps: int) -> Biases:
    """Train in a loop around `parallelize`, in two micro-batches."""
    config = case.config.model
    model = t3.parallelize(
        partial(make_model, config), model_plan(config, case.sequence), dtype=torch.float64, micro_batches=2, seed=11
    )
    made = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    optimizer = t3.distributed_optimizer(made, model, clip_grad_norm=case.clip)
    for step in range(steps):
        tokens, labels = global_batch(case, step)
        size = case.batch // model.mesh.dp.size
        mine = slice(model.mesh.dp.index * size, (model.mesh.dp.index + 1) * size)
        model.train_batch((tokens[mine], labels[mine]), of_logits)
        optimizer.step()
    return {name: value for name, value in model.state_dict().items() if name.endswith("routing.bias")}


def of_logits(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return output.square().mean()


def test_a_loop_of_ones_own_moves_them_alike(pool: WorkerPool) -> None:
    """Around `parallelize`, with a loss of one's own: every token counts."""
    (alone,) = pool.run(1, by_hand, CASE, 3)
    assert len(alone) == CASE.layers - 1
    assert all(value.any() for value in alone.values())
    for biases in pool.run(2, by_hand, CASE, 3):
        assert all(value.equal(alone[name]) for name, value in biases.items())
