"""Evaluation against an average taken by hand, and what it leaves untouched."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.nn import functional as F

from tests.support.parity import MOE, MOE_SIZES, Case, make_engine, shard_of
from tests.support.sweep import sweep
from tests.train.support import Run, engine_of, evaluated, write_ids
from threefold.data.dataset import open_dataset
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.packed import PackedSamples
from threefold.data.samples import document_runs
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.parallel.parameter import draw_
from threefold.train.loop import evaluate
from threefold.train.run import open_loader, open_samples
from threefold.verify.worker_pool import WorkerPool


def offline(run: Run, batches: int) -> tuple[float, int]:
    """Mean loss and tokens of the first held-out samples, one at a time through the unsplit model."""
    config = run.config
    model = GPT(config.model).double()
    plan = gpt_plan(config.model, config.data.sequence_length)
    for name, parameter in model.named_parameters():
        draw_(parameter, parameter, name, plan, config.train.seed)
    files = TokenFiles.open(run.data)
    samples = PackedSamples.open(files, "valid", config.data.split, config.data.sequence_length)
    count = min(len(samples), batches * config.train.global_batch_size)
    windows = torch.from_numpy(samples.read(np.arange(count)))
    losses = []
    for window in windows:
        with torch.no_grad():
            each = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        losses.append(each[window[:-1] != files.eod])
    joined = torch.cat(losses)
    return joined.mean().item(), joined.numel()


# The larger number takes the whole part, whose last batch is not full.
@sweep("batches", [2, 10_000], quick=(0,))
@sweep(
    ("dp", "tp", "pp", "cp"),
    [(1, 1, 1, 1), (4, 1, 1, 1), (2, 2, 2, 1), (1, 1, 1, 2), (1, 2, 2, 2)],
    quick=(2,),
    slow=(3,),
)
def test_it_equals_an_offline_average(
    pool: WorkerPool, small_run: Run, dp: int, tp: int, pp: int, cp: int, batches: int
) -> None:
    run = small_run.but(dp=dp, tp=tp, pp=pp, cp=cp, dtype="fp64", set=(("train.eval_every", 1),))
    ((expected, tokens),) = pool.run(1, offline, run, batches)
    found = pool.run(run.world_size, evaluated, run, batches)
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(expected, rel=1e-12)
    assert found[0][1] == tokens


def with_and_without(run: Run) -> tuple[bool, bool, bool, list[float]]:
    """Whether an evaluation between two steps changes gradients, weights or random numbers; the steps' losses."""
    config = run.config
    engine = engine_of(config)
    loader = open_loader(config, open_samples(config, open_dataset(config)), engine.mesh.dp)
    losses = [engine.train_step(loader.batch(0), 0).loss]
    loss, tokens = engine.compute_gradients(loader.batch(1), 1)
    gradients = [entry.gradient.clone() for entry in engine.optimizer.entries]
    weights = [entry.leaf.detach().clone() for entry in engine.optimizer.entries]
    state = torch.get_rng_state()
    evaluate(engine, loader, 3, 1)
    same_gradients = all(
        torch.equal(before, entry.gradient) for before, entry in zip(gradients, engine.optimizer.entries, strict=True)
    )
    same_weights = all(
        torch.equal(before, entry.leaf) for before, entry in zip(weights, engine.optimizer.entries, strict=True)
    )
    same_random = torch.equal(state, torch.get_rng_state())
    losses.append(engine.update(loss, tokens, 1).loss)
    losses.append(engine.train_step(loader.batch(2), 2).loss)
    loader.close()
    return same_gradients, same_weights, same_random, losses


def plain_steps(run: Run) -> list[float]:
    engine = engine_of(run.config)
    loader = open_loader(run.config, open_samples(run.config, open_dataset(run.config)), engine.mesh.dp)
    losses = [engine.train_step(loader.batch(step), step).loss for step in range(3)]
    loader.close()
    return losses


@sweep("pp", [1, 2], quick=(1,))
def test_it_leaves_gradients_and_randomness_alone(pool: WorkerPool, small_run: Run, pp: int) -> None:
    run = small_run.but(tp=2, pp=pp, dropout=0.2, set=(("train.eval_every", 1),))
    found = pool.run(run.world_size, with_and_without, run)
    plain = pool.run(run.world_size, plain_steps, run)
    assert found == [(True, True, True, losses) for losses in plain]
    assert all(losses == plain[0] for losses in plain), "the loss differs between ranks"


def test_nothing_to_count(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Documents that are empty hold nothing that could be predicted."""
    split = "2,99"
    training = {number for first, end in document_runs(101, split, "train") for number in range(first, end)}
    documents = [[1] * 400 if number in training else [] for number in range(101)]
    tokenizer = Tokenizer(models.WordLevel({"end": 0, "w": 1}, unk_token="w"))
    data = write_ids(tmp_path / "tokens", documents, tokenizer, 0)
    run = small_run.but(data=data, set=(("train.eval_every", 1), ("data.split", split)))
    with pytest.raises(
        Exception, match=r"are masked: none of the [1-9][0-9]* samples read has a token to predict, as in"
    ):
        pool.run(1, evaluated, run, 3)


def evaluated_in_training(case: Case) -> tuple[float, bool, float]:
    """The loss of an evaluation before the first step, whether layers are in training mode after it, and the loss of
    the step."""
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    loss = engine.eval_batch(batch).loss
    training = all(module.training for stage in engine.stages for module in stage.modules())
    return loss, training, engine.train_step(batch, 0).loss


@sweep(("dp", "pp"), [(1, 1), (2, 1), (1, 2)], ids=str, quick=(2,))
def test_it_drops_nothing(pool: WorkerPool, dp: int, pp: int) -> None:
    """Neither by dropout nor for the capacity of an expert: the loss is that of the model without either."""
    dropping = replace(MOE, dp=dp, pp=pp)
    plain = replace(dropping, dropout=0.0, model=(*MOE_SIZES, ("expert_capacity_factor", 0.0)))
    ranks = dp * pp
    expected = pool.run(ranks, evaluated_in_training, plain)[0]
    found = pool.run(ranks, evaluated_in_training, dropping)
    for loss, training, step_loss in found:
        assert loss == pytest.approx(expected[0], rel=1e-12)
        assert training
        assert abs(step_loss - expected[2]) > 1e-3  # which does drop


def after_a_rollback(case: Case) -> tuple[float, float, float]:
    """The loss of a batch; after other weights were loaded; and of a training step with those."""
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    before = engine.eval_batch(batch).loss
    with torch.no_grad():
        for entry in engine.optimizer.entries:
            entry.master.mul_(1.5)
    engine.optimizer.restored()
    return before, engine.eval_batch(batch).loss, engine.train_step(batch, 0).loss


@sweep("zero", [1, 2, 3], quick=(0, 1))
def test_weights_that_are_loaded_after_an_evaluation_are_used(pool: WorkerPool, zero: int) -> None:
    """An evaluation leaves gathered weights behind with ZeRO 1 and 2, which are out of date after a rollback."""
    case = Case(dtype="fp64", dp=2)
    expected = pool.run(2, after_a_rollback, case)[0]
    assert abs(expected[1] - expected[0]) > 1e-3
    for found in pool.run(2, after_a_rollback, replace(case, settings=(("parallel.zero", zero),))):
        assert found == pytest.approx(expected, rel=1e-12)
