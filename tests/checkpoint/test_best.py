"""The best checkpoint: which it is, that retention keeps it, and that commands find it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.kills import killed_at
from tests.resilience.faults import Fault, train_with
from tests.support.sweep import sweep
from tests.train.support import Run, manifest, train_rank
from threefold.checkpoint.folder import best_step, complete, named_step, path_of, superfluous
from threefold.checkpoint.manifest import Facts
from threefold.errors import UserError
from threefold.report.metrics import read_metrics
from threefold.resilience.remote import RemoteCheckpoints
from threefold.verify.worker_pool import WorkerError, WorkerPool


def facts(step: int, metric: str = "valid_loss", value: float | None = None) -> Facts:
    return Facts(step, 0, 0, None, None, 0, 0, measured=None if value is None else (metric, value))


def test_it_is_the_first_of_the_lowest_of_the_newest_metric() -> None:
    assert best_step([]) is best_step([facts(1), facts(2)]) is None
    assert best_step([facts(1, value=3.0), facts(2, value=2.0), facts(3, value=2.0), facts(4)]) == 2
    other = facts(5, "valid_loss_average", 9.0)
    assert best_step([facts(1, value=3.0), facts(2, value=2.0), other]) == 5
    assert superfluous([1, 2, 3, 4, 5, 6], 2, 3, 2) == [1, 4]
    assert superfluous([1, 2, 3], 0, None, 2) == []


SETTINGS: tuple[tuple[str, Any], ...] = (
    *(("checkpoint.keep_best", "valid_loss"), ("checkpoint.keep", 1), ("checkpoint.every", 4)),
    *(("train.eval_every", 1), ("train.eval_batches", 2), ("optimizer.lr", 0.03), ("optimizer.decay", "linear")),
    *(("optimizer.min_lr", 1.0), ("optimizer.decay_steps", 10)),  # it rises, until the loss does
)


def measured(run_dir: Path) -> dict[int, float]:
    lines = read_metrics(run_dir / "metrics.jsonl")
    return {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}


@sweep("layout", [{}, {"dp": 2, "pp": 2}, {"tp": 2, "set": (("checkpoint.async_save", True),)}], quick=(0, 2), ids=str)
def test_it_is_kept_beside_the_newest(pool: WorkerPool, small_run: Run, tmp_path: Path, layout: dict[str, Any]) -> None:
    run = small_run.but(**{**layout, "set": (*SETTINGS, *layout.get("set", ()))}, steps=10, dropout=0.0)
    printed = pool.run(run.world_size, train_rank, run, tmp_path)[0]
    losses = measured(tmp_path)
    best = min(losses, key=lambda step: losses[step])
    better = {step for step in losses if all(losses[step] < losses[before] for before in range(1, step))}
    assert {int(step) for step in re.findall(r"checkpoints/step_(\d+)", printed)} == {*better, 4, 8, 10}
    assert 1 < best < 10, losses  # or there is nothing to keep beside the newest
    assert [each.step for each in complete(tmp_path)] == [best, 10]
    assert manifest(path_of(tmp_path, best))["measured"] == ["valid_loss", losses[best]]
    assert named_step(tmp_path, "best") == path_of(tmp_path, best)


def test_a_resumed_run_remembers_it(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Also after a metric that is not finite, and in another layout; a better one takes its place."""
    run = small_run.but(set=SETTINGS, steps=10, dropout=0.0)
    pool.run(1, train_rank, run, tmp_path)
    best = complete(tmp_path)[0].step
    value = measured(tmp_path)[best]
    pool.run(2, train_rank, run.but(tp=2, steps=13), tmp_path, True)
    assert min(list(measured(tmp_path).values())[10:]) > value
    assert [each.step for each in complete(tmp_path)] == [best, 13]
    shutil.rmtree(path_of(tmp_path, 13))
    better = (*SETTINGS, ("optimizer.min_lr", 0.001), ("train.eval_every", 8))
    pool.run(1, train_rank, run.but(set=better, steps=30), tmp_path, True)
    losses = measured(tmp_path)
    best = min(losses, key=lambda step: losses[step])
    assert losses[best] < value
    assert {each.step for each in complete(tmp_path)} == {best, 30}


def test_a_loss_that_is_not_finite_is_never_the_best(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(set=SETTINGS, steps=10, dropout=0.0)
    # The step is one micro-batch, so the second of its passes is the evaluation's first.
    pool.run(1, train_with, [Fault("output", "blocks.1.mlp.up", 0, 2, 1)], run, tmp_path)
    losses = measured(tmp_path)
    assert losses.pop(2) is None
    best = min(losses, key=lambda step: losses[step])
    assert best > 2
    assert [each.step for each in complete(tmp_path)] == [best, 10]


@pytest.mark.parametrize("event", ["os.rename", pytest.param("shutil.rmtree", marks=pytest.mark.slow)])
def test_a_kill_while_the_best_is_saved_loses_nothing(
    pool: WorkerPool, small_run: Run, tmp_path: Path, event: str
) -> None:
    """The value of the best is in its manifest, which completes it: neither is there without the other."""
    run = small_run.but(set=SETTINGS, steps=10, dropout=0.0)
    pool.run(1, train_rank, run, tmp_path / "whole")
    best = complete(tmp_path / "whole")[0].step
    assert best > 2
    killed_in = best if event == "os.rename" else best - 1  # which is deleted once there is a better one
    with pytest.raises(WorkerError, match="SIGKILL"):
        pool.run(1, killed_at, run, tmp_path / "killed", event, f"step_{killed_in:08d}.partial", 0)
    held = {each.step: each.facts.measured for each in complete(tmp_path / "killed")}
    assert held
    assert all(value is not None for value in held.values())
    assert named_step(tmp_path / "killed", "best") == path_of(tmp_path / "killed", max(held))
    pool.run(1, train_rank, run, tmp_path / "killed", True)
    for step in (best, 10):
        whole, killed = (manifest(path_of(tmp_path / name, step)).get("measured") for name in ("whole", "killed"))
        assert whole == killed
    assert [each.step for each in complete(tmp_path / "killed")] == [best, 10]


def test_its_copy_is_kept(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'there'}"
    run = small_run.but(set=(*SETTINGS, ("checkpoint.remote", address)), steps=10, dropout=0.0)
    pool.run(1, train_rank, run, tmp_path / "run")
    steps = [each.step for each in complete(tmp_path / "run")]
    assert RemoteCheckpoints(address).steps() == steps
    assert len(steps) == 2


def test_a_run_without_it_keeps_its_manifests(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    pool.run(1, train_rank, small_run.but(set=(("train.eval_every", 2),)), tmp_path)
    assert "measured" not in manifest(path_of(tmp_path, 4))
    with pytest.raises(UserError, match=r"with checkpoint[.]keep_best and has checkpoints of the steps 4;"):
        named_step(tmp_path, "best")
    with pytest.raises(UserError, match="--step is 7 but must be best or the step of a checkpoint"):
        named_step(tmp_path, "7")
    assert named_step(tmp_path, "4") == path_of(tmp_path, 4)


def test_commands_mark_and_read_it(threefold, pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(set=(*SETTINGS, ("model.vocab_size", None)), steps=10, dropout=0.0)
    pool.run(1, train_rank, run, tmp_path / "run")
    best, last = (each.step for each in complete(tmp_path / "run"))
    listed = threefold("checkpoint", "list", tmp_path / "run")
    assert f"step_{best:08d} is the best: its valid_loss is " in listed.output
    documents = json.loads(threefold("checkpoint", "list", tmp_path / "run", "--json").output)
    assert [each["step"] for each in documents if each.get("best")] == [best]
    data = tmp_path / "held.jsonl"
    data.write_text('{"text": "The statement returns a value, and the function ends."}\n')
    for options, step in ((("--step", "best"), best), (("--step", str(best)), best), ((), last)):
        out = tmp_path / f"out-{len(options)}-{options[-1:]}"
        evaluated = threefold("eval", tmp_path / "run", "--data", data, *options)
        assert f"step {step}," in evaluated.output
        exported = threefold("checkpoint", "export", tmp_path / "run", "--out", out, *options)
        assert f"{step} steps" in exported.output
    shutil.rmtree(path_of(tmp_path / "run", best))
    assert "is not" not in threefold("checkpoint", "list", tmp_path / "run").error
