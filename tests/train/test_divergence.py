"""Checkpoints of a run whose numbers stop being finite: the good ones stay, and are what a resumed run starts from."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.sweep import sweep
from tests.train.support import Run, manifest, steps_of, train_rank
from threefold.checkpoint.folder import complete, newest, path_of
from threefold.errors import UserError
from threefold.verify.worker_pool import WorkerError, WorkerPool

GOOD = 5
"""Steps before the learning rate is spoilt."""


def folders(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in complete(run_dir)]


def diverged(pool: WorkerPool, run: Run, run_dir: Path) -> str:
    """Train a few good steps, continue with a learning rate that spoils the weights, and return how that ended."""
    well = run.but(steps=GOOD, set=tuple(setting for setting in run.set if not setting[0].startswith("optimizer.")))
    pool.run(run.world_size, train_rank, well, run_dir)
    with pytest.raises(WorkerError) as caught:
        pool.run(run.world_size, train_rank, run, run_dir, True)
    assert isinstance(caught.value.error, UserError)
    return str(caught.value.error)


@sweep(("layout", "keep"), [({}, 1), ({"dp": 2}, 2), ({"pp": 2}, 1)], ids=["1", "dp2", "pp2"], quick=(0,))
def test_skipped_steps_replace_no_good_checkpoint(
    pool: WorkerPool, small_run: Run, tmp_path: Path, layout: dict[str, int], keep: int
) -> None:
    """fp16: the update of step 6 spoils the weights, and every step after it overflows, down to the least scale."""
    spoilt = (("optimizer.lr", 1e6), ("checkpoint.every", 1), ("checkpoint.keep", keep))
    run = small_run.but(dtype="fp16", steps=40, set=spoilt, **layout)
    sentence = diverged(pool, run, tmp_path / "run")
    lines = steps_of(tmp_path / "run")
    assert [step for step, line in lines.items() if line["skipped"]] == list(range(7, len(lines) + 1))
    assert len(lines) > GOOD + 10
    assert sentence.startswith(f"Training diverged at step {len(lines) + 1}: the loss is ")
    assert "lower optimizer.lr (1e+06), to 500000 say" in sentence
    aside, good = (path_of(tmp_path / "run", step) for step in (6, GOOD))
    assert f"which is {aside}.diverged now, so --resume starts from {good}." in sentence
    # With keep 1 the checkpoint of step 5 is old when that of step 6 proves good, which it never does.
    assert folders(tmp_path / "run")[-2:] == ["step_00000005", "step_00000006.diverged"]
    assert manifest(good)["step"] == GOOD
    found = newest(tmp_path / "run")
    assert found is not None
    assert found.path == good

    mended = run.but(steps=7, set=(("optimizer.lr", 1e-2), *spoilt[1:]))
    printed = pool.run(run.world_size, train_rank, mended, tmp_path / "run", True)[0]
    assert str(good) in printed
    assert not any(line["skipped"] for line in steps_of(tmp_path / "run").values())
    assert steps(tmp_path / "run") == [6, 7][-keep:]


def test_a_save_that_is_due_while_steps_are_skipped_waits(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """A first scale so large that the first steps overflow: nothing is saved before one does not."""
    settings = (("precision.loss_scale", 2.0**26), ("checkpoint.every", 2), ("checkpoint.keep", 0))
    run = small_run.but(dtype="fp16", steps=14, set=settings)
    pool.run(1, train_rank, run, tmp_path)
    skipped = {step for step, line in steps_of(tmp_path).items() if line["skipped"]}
    assert {1, 2, 3, 4} <= skipped
    first_good = min(set(range(1, 15)) - skipped)
    saved = steps(tmp_path)
    assert saved[0] == first_good
    assert not skipped & set(saved[:-1])
    assert saved[-1] == 14


@sweep("dtype", ["fp32", "bf16"], quick=(0,))
@pytest.mark.parametrize(("lr", "saved"), [(1e25, True), (1e38, False)], ids=["huge", "infinite"])
def test_a_loss_that_is_no_number_replaces_no_good_checkpoint(
    pool: WorkerPool, small_run: Run, tmp_path: Path, dtype: str, lr: float, saved: bool
) -> None:
    """Weights so large that the loss of the next step is not a number; or that are none themselves, by weight decay."""
    settings = (("checkpoint.every", 1), ("checkpoint.keep", 1), ("optimizer.clip_grad_norm", 0.0))
    spoilt = (*settings, ("optimizer.lr", lr), ("optimizer.weight_decay", 100.0))
    run = small_run.but(dtype=dtype, dp=2, steps=40, set=spoilt)
    sentence = diverged(pool, run, tmp_path)
    assert steps(tmp_path) == [GOOD]
    assert sentence.startswith(f"Training diverged at step {7 if saved else 6}: ")
    assert f"--resume starts from {path_of(tmp_path, GOOD)}." in sentence
    assert (path_of(tmp_path, 6).with_name("step_00000006.diverged") in (tmp_path / "checkpoints").iterdir()) is saved


def test_the_last_step_is_measured_before_it_replaces_another(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """No step follows that would show what the last update did."""
    settings = (("checkpoint.every", 1), ("checkpoint.keep", 1), ("optimizer.lr", 1e25))
    run = small_run.but(dp=2, steps=GOOD + 1, set=settings)
    sentence = diverged(pool, run, tmp_path)
    assert sentence.startswith("Training diverged at step 6: the loss of the weights after it is nan")
    assert folders(tmp_path) == ["step_00000005"]


@pytest.mark.slow
def test_the_only_checkpoint_stays(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    settings = (("checkpoint.every", 1), ("optimizer.lr", 1e25), ("optimizer.warmup_steps", 0))
    with pytest.raises(
        WorkerError, match=r"Training diverged at step 2: .* no good step followed .*step_00000001: start a new run"
    ):
        pool.run(1, train_rank, small_run.but(set=settings), tmp_path)
    assert folders(tmp_path) == ["step_00000001"]


@pytest.mark.slow
def test_a_resumed_checkpoint_of_a_diverged_model_is_named(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """As a kill between the save and the first bad step leaves it; another precision might still read it."""
    settings = (("checkpoint.every", 1), ("optimizer.lr", 1e25), ("checkpoint.keep", 0))
    run = small_run.but(steps=40, set=settings)
    diverged(pool, run, tmp_path)
    aside = path_of(tmp_path, 6).with_name("step_00000006.diverged")
    aside.rename(path_of(tmp_path, 6))
    with pytest.raises(
        WorkerError,
        match=r"diverged at step 7.* no good step followed .*step_00000006: remove it to resume from .*5\.",
    ):
        pool.run(1, train_rank, run, tmp_path, True)
    assert steps(tmp_path)[-1] == 6
    shutil.rmtree(path_of(tmp_path, 6))
    pool.run(1, train_rank, small_run.but(steps=6), tmp_path, True)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6
