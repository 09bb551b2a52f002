"""The moving average of the weights in runs: skipped steps, precision, evaluation, checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.resilience.faults import Fault, train_with
from tests.support.parity import Case, make_engine, shard_of
from tests.train.overflows import FP16
from tests.train.support import Run, engine_of, losses_of, train_rank
from threefold.checkpoint.folder import named_step, newest, path_of
from threefold.checkpoint.resume import find_warm_start
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.config.optimizer import OptimizerConfig
from threefold.errors import UserError
from threefold.planner.dry_run import dry_run
from threefold.planner.model_size import ModelSize
from threefold.planner.stage_memory import stage_memory
from threefold.train.average import WeightAverage
from threefold.train.state import load_weights, model_tensors, restore_engine
from threefold.verify.worker_pool import WorkerPool

DECAY = ("optimizer.ema_decay", 0.75)
EMA = (DECAY, ("optimizer.ema_warmup", False))


def stored(run_dir: Path, step: int, prefix: str = "average.") -> dict[str, Tensor]:
    path = path_of(run_dir, step)
    index = {name: facts for name, facts in stored_tensors(path).items() if name.startswith(prefix)}
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in index.items()}
    load_tensors(found, path, alone=True)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def test_the_decay_is_warmed_up_and_starts_late() -> None:
    given = {"ema_decay": 0.3, "ema_start": 2, "ema_every": 3, "ema_warmup": True}
    average = WeightAverage([], OptimizerConfig.model_validate(given))
    found = [average.decay(update) for update in range(1, 13)]
    assert found == [0.0, 0.0, None, None, 2 / 11, None, None, 3 / 12, None, None, 0.3, None]


def _skipping(case: Case) -> list[bool]:
    engine = make_engine(case)
    assert engine.optimizer.average is not None
    moved = []
    for step in range(3):
        before = {name: tensor.clone() for name, tensor in engine.optimizer.average.tensors.items()}
        hook = engine.optimizer.entries[0].leaf.register_hook(lambda grad: grad * torch.inf) if step == 1 else None
        engine.train_step(shard_of(case, step, 0), step)
        if hook is not None:
            hook.remove()
        moved.append(any(not before[name].equal(now) for name, now in engine.optimizer.average.tensors.items()))
    return moved


def test_a_skipped_step_does_not_move_the_average(pool: WorkerPool) -> None:
    case = Case(dtype=FP16.dtype, update=EMA)
    assert pool.run(1, _skipping, case)[0] == [True, False, True]


def _averaged(case: Case) -> list[Any]:
    engine = make_engine(case)
    optimizer = engine.optimizer
    by_hand = {entry.name: entry.master.detach().double().clone() for entry in optimizer.entries}
    for step in range(3):
        engine.train_step(shard_of(case, step, engine.mesh.dp.index), step)
        for entry in optimizer.entries:
            by_hand[entry.name] += (entry.master.detach().double() - by_hand[entry.name]) * 0.25
    averages = {entry.name: average.clone() for entry, average in optimizer.averages()}
    masters = [entry.master.detach().clone() for entry in optimizer.entries]
    leaves = [weight.leaf.detach().clone() for weight in engine.model.weights]
    with optimizer.averaged():
        used = all(entry.leaf.equal(averages[entry.name].to(entry.leaf.dtype)) for entry in optimizer.entries)
    kept = all(one.equal(entry.master) for one, entry in zip(masters, optimizer.entries, strict=True))
    kept = kept and all(one.equal(weight.leaf) for one, weight in zip(leaves, engine.model.weights, strict=True))
    kept = kept and all(averages[entry.name].equal(average) for entry, average in optimizer.averages())
    error = max(float((averages[name] - value).abs().max()) for name, value in by_hand.items() if value.numel())
    return [error, {average.dtype for average in averages.values()}, used, kept]


@pytest.mark.parametrize(
    ("dtype", "master", "zero"), [("bf16", True, 0), ("bf16", True, 3), ("bf16", False, 0), ("fp64", True, 1)]
)
def test_masters_are_averaged(pool: WorkerPool, dtype: str, master: bool, zero: int) -> None:
    """In fp32, or fp64; computing with the averages for a while leaves every bit as it was."""
    settings = (("precision.master_weights", master), ("parallel.zero", zero))
    case = Case(dtype=dtype, update=EMA, settings=settings, dp=2)
    for error, dtypes, used, kept in pool.run(2, _averaged, case):
        assert error < (1e-15 if dtype == "fp64" else 3e-7)
        assert dtypes == {torch.float64 if dtype == "fp64" else torch.float32}
        assert used
        assert kept


def test_a_run_evaluates_saves_and_resumes_it_in_any_layout(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    settings = (*EMA, ("train.eval_every", 2), ("train.eval_batches", 1), ("optimizer.decay_steps", 20))
    run = small_run.but(dtype="fp64", steps=6, set=settings)
    pool.run(1, train_rank, run, tmp_path / "whole")
    pool.run(2, train_rank, run.but(tp=2, steps=3), tmp_path / "broken")
    broken = run.but(dp=2, pp=2, set=(*settings, ("parallel.zero", 1)))
    pool.run(4, train_rank, broken, tmp_path / "broken", True)
    whole, other = stored(tmp_path / "whole", 6), stored(tmp_path / "broken", 6)
    weights = stored(tmp_path / "whole", 6, "model.")
    assert whole.keys() == other.keys() == weights.keys()
    for name, average in whole.items():
        assert torch.allclose(average, other[name], rtol=0, atol=1e-12 * float(average.abs().max()))
        assert not average.equal(weights[name])
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "valid_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6]
    assert all(line["valid_loss_average"] != line["valid_loss"] for line in evaluations)
    pool.run(1, train_rank, run.but(set=settings[2:]), tmp_path / "plain")
    assert losses_of(tmp_path / "plain") == losses_of(tmp_path / "whole")


def _loaded(run: Run, folder: Path, by: str) -> list[bool]:
    engine, found = engine_of(run.config), newest(folder)
    assert found is not None
    (load_weights if by == "warm start" else restore_engine)(engine, found)
    return [average.equal(entry.master) for entry, average in engine.optimizer.averages()]


@pytest.mark.parametrize("by", ["warm start", "resume"])
def test_it_starts_from_the_weights_of_a_checkpoint_without_one(
    pool: WorkerPool, small_run: Run, tmp_path: Path, by: str
) -> None:
    pool.run(1, train_rank, small_run.but(steps=2), tmp_path)
    assert all(pool.run(1, _loaded, small_run.but(set=EMA), tmp_path, by)[0])


@pytest.mark.parametrize("layout", [{"dp": 2}, pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.slow)], ids=str)
def test_a_rollback_restores_it(pool: WorkerPool, small_run: Run, tmp_path: Path, layout: dict[str, int]) -> None:
    """Step 4 moves the average, and step 5 is bad: both are taken back, as if never made."""
    settings = (*EMA, ("checkpoint.every", 3), ("parallel.zero", 1 if "dp" in layout else 0))
    run = small_run.but(steps=7, set=(*settings, ("train.on_nan", "rollback")), **layout)
    fault = Fault("gradient", "blocks.1.mlp.up", run.world_size - 1, 5)
    if "pp" in layout:
        fault = Fault("gradient", "blocks.0.mlp.up", 0, 5)
    pool.run(run.world_size, train_with, [fault], run, tmp_path / "bad")
    purpose = run.but(set=(*settings, ("data.skip_steps", ["4-5"])))
    pool.run(run.world_size, train_rank, purpose, tmp_path / "purpose")
    found, expected = stored(tmp_path / "bad", 7), stored(tmp_path / "purpose", 7)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(average) for name, average in expected.items())


def _begun(run: Run) -> dict[str, Tensor]:
    """Whole weights from which a run begins, on this rank's stage."""
    engine, found = engine_of(run.config), find_warm_start(run.config)
    assert found is not None
    load_weights(engine, found.checkpoint, bool(run.config.train.init_average))
    return {name.removeprefix("model."): whole(each).clone() for name, each in model_tensors(engine).items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_another_run_begins_with_the_average_of_the_best(
    pool: WorkerPool, small_run: Run, tmp_path: Path, layout: dict[str, int]
) -> None:
    best = (("checkpoint.keep_best", "valid_loss_average"), ("train.eval_every", 1), ("checkpoint.keep", 1))
    pool.run(1, train_rank, small_run.but(steps=3, set=(*EMA, *best)), tmp_path)
    assert named_step(tmp_path, "best") == path_of(tmp_path, 3)
    begun = (("train.init_from", str(tmp_path)), ("train.init_average", True), ("train.init_step", "best"))
    found = pool.run(2, _begun, small_run.but(set=begun, **layout))
    together = found[0] | found[1]
    averages, weights = stored(tmp_path, 3), stored(tmp_path, 3, "model.")
    assert together.keys() == averages.keys()
    assert all(together[name].equal(average) for name, average in averages.items())
    assert not all(together[name].equal(weight) for name, weight in weights.items())


def test_a_start_that_is_not_there_is_one_sentence(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    pool.run(1, train_rank, small_run.but(steps=1), tmp_path)
    begun = ("train.init_from", str(tmp_path))
    for more, sentence in (
        (("train.init_step", 7), r"train.init_step is 7 but must be best or the step of a checkpoint, and .* has"),
        (("train.init_step", "best"), r"train.init_step is best but .* was not trained with checkpoint.keep_best"),
        (("train.init_average", True), r"train.init_average is true but .* has none; leave it out, or train with"),
    ):
        with pytest.raises(UserError, match=sentence):
            find_warm_start(small_run.but(set=(begun, more)).config)
    with pytest.raises(UserError, match=r"train.init_step is 7 but train.init_from is not given; leave it out"):
        _ = small_run.but(set=(("train.init_step", 7),)).config


def _thawed(run: Run, folder: Path) -> list[tuple[str, bool]]:
    engine, found = engine_of(run.config), newest(folder)
    assert found is not None
    restore_engine(engine, found)
    return [(entry.name, average.equal(entry.master)) for entry, average in engine.optimizer.averages()]


def test_a_weight_that_thaws_starts_its_own(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    frozen = ("optimizer.frozen", ["blocks.1"])
    pool.run(1, train_rank, small_run.but(steps=3, set=(*EMA, frozen)), tmp_path)
    assert not [name for name in stored(tmp_path, 3) if name.startswith("blocks.1.")]
    for name, is_new in pool.run(1, _thawed, small_run.but(set=EMA), tmp_path)[0]:
        assert is_new == name.startswith("blocks.1."), name


@pytest.mark.parametrize(("dtype", "masters"), [("fp32", True), ("bf16", True), ("bf16", False)])
def test_memory_counts_it(dtype: str, masters: bool) -> None:
    plain = Case(dtype=dtype, layers=4, settings=(("precision.master_weights", masters), ("parallel.zero", 1)), dp=2)
    case = Case(**{**vars(plain), "update": EMA})
    added = 4 * ModelSize(case.config).largest_rank(0).parameters
    assert dry_run(case.config, 0).optimizer_bytes - dry_run(plain.config, 0).optimizer_bytes == added
    estimated = [stage_memory(each.config, "cpu")[0].optimizer for each in (case, plain)]
    assert estimated[0] - estimated[1] == added


def test_its_settings_need_a_decay() -> None:
    with pytest.raises(UserError, match="ema_decay is not given"):
        _ = Case(update=(("optimizer.ema_start", 10),)).config
