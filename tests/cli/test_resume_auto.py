"""`threefold train --resume=auto`, alone and under a launcher that starts killed ranks again; and two runs at once."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runs import command, end_of, losses, read_until, start, start_ready, wait_for
from tests.support import ready
from threefold.train.callbacks.base import Callback

STEPS = ("--set", "train.max_steps=40", "--set", "checkpoint.every=10", "--set", "log.every=1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "2", "--nproc-per-node", "2")


class Hold(Callback):
    """Stop before step 25, after two checkpoints, until the process is killed; never again once `file` is there."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def before_step(self, step: int, batch: Any) -> None:
        if step == 25 and not self.file.exists():
            self.file.touch()
            signal.pause()


def run_to_its_end(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    if arguments[1:3] == ["-m", "threefold"]:
        return ready.run(arguments)
    return subprocess.run(arguments, text=True, capture_output=True, timeout=300)


@pytest.mark.slow
def test_starts_continues_and_has_nothing_left_to_do(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = command(config_file, run, "--resume=auto")
    first = run_to_its_end(arguments)
    assert first.returncode == 0, first.stderr
    again = run_to_its_end(arguments)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == f"{run} has completed all its 4 steps; there is nothing left to do.\n"
    for setting, was in (("train.seed=3", "1234"), ("optimizer.lr=0.5", "0.0006"), ("model.num_layers=3", "2")):
        other = run_to_its_end([*arguments, "--set", setting])
        assert (other.returncode, other.stdout, other.stderr.count("\n")) == (2, "", 1)
        assert f"set it to {was}, or start a new run in another folder." in other.stderr
    longer = run_to_its_end([*arguments, "--set", "train.max_steps=6"])
    assert longer.returncode == 0, longer.stderr
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]


def test_option_takes_no_other_word_for_its_value(threefold, config_file: Path, tmp_path: Path) -> None:
    status, _, error = threefold("train", "--resume", config_file, "--run-dir", tmp_path / "run")
    assert status == 2
    assert "has no complete checkpoint" in error
    status, _, error = threefold("train", config_file, "--run-dir", tmp_path / "run", "--resume=perhaps")
    assert status == 2
    assert "'auto'" in error


def test_auto_does_not_train_over_a_damaged_checkpoint(threefold, config_file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "run" / "checkpoints" / "step_00000002"
    damaged.mkdir(parents=True)
    status, _, error = threefold("train", config_file, "--run-dir", tmp_path / "run", "--resume=auto")
    assert status == 2
    assert "step_00000002" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_killed_rank_under_torchrun_is_started_again(config_file: Path, tmp_path: Path) -> None:
    """The run ends with the losses of an undisturbed one, bit for bit, and each step once in the metrics."""
    run = tmp_path / "run"
    options = (*STEPS, "--set", "parallel.dp=2", "--set", "train.eval_every=0")
    held = tmp_path / "held"
    callback = f"train.callbacks=[{{name: '{__file__}:Hold', file: '{held}'}}]"
    arguments = command(config_file, run, *options, "--set", callback, "--resume=auto")
    process = start([arguments[0], *TORCHRUN, *arguments[1:]])
    wait_for(held.exists, process)
    ranks = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if f"\0--run-dir\0{run}\0".encode() in _cmdline(path) and b"torch.distributed.run" not in _cmdline(path)
    ]
    assert ranks
    os.kill(ranks[0], signal.SIGKILL)
    code, output, _ = end_of(process)
    assert code == 0
    assert "Resuming from" in output
    whole = run_to_its_end(command(config_file, tmp_path / "whole", *options))
    assert whole.returncode == 0
    assert losses(run) == losses(tmp_path / "whole")
    assert len(losses(run)) == 40


def _cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["local", "torchrun"])
def test_second_run_in_the_folder_is_refused_once(config_file: Path, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    endless = ("--set", "train.max_steps=1000000", "--set", "log.every=1", "--set", "parallel.dp=2")
    first = start_ready(command(config_file, run, *endless))
    try:
        read_until(first, " 1/")
        config = (run / "config.yaml").read_bytes()
        arguments = command(config_file, run, *endless, "--resume=auto", "--set", "train.seed=99")
        refused = run_to_its_end([arguments[0], *launcher, *arguments[1:]])
        assert refused.returncode != 0
        told = [line for line in refused.stderr.splitlines() if line.startswith("Error: ")]
        assert len(set(told)) == 1
        assert len(told) == (3 if launcher else 1)  # torchrun tried as often as it was told to
        assert f"{run} is in use by another run (process {first.pid} on host " in told[0]
        assert "Traceback (most recent call last)" not in refused.stderr or launcher  # torchrun's own
        assert (run / "config.yaml").read_bytes() == config
    finally:
        first.kill()
        first.communicate()


@pytest.mark.slow
def test_run_starts_again_after_its_parent_was_killed(config_file: Path, tmp_path: Path) -> None:
    """Its ranks end with it, and with them their hold on the folder."""
    run, options = tmp_path / "run", (*STEPS, "--set", "parallel.dp=2", "--resume=auto")
    process = start_ready(command(config_file, run, *options))
    wait_for(lambda: (run / "checkpoints" / "step_00000010").exists(), process)
    process.kill()
    process.wait()
    again = run_to_its_end(command(config_file, run, *options))
    assert again.returncode == 0, again.stderr
    assert [step for step, _ in losses(run)] == list(range(1, 41))
    process.communicate()


@pytest.mark.parametrize("kind", ["fifo", "loop", "long", "dangling"])
def test_run_folder_that_cannot_be_one(threefold, config_file: Path, tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    if kind == "fifo":
        os.mkfifo(run)
    elif kind == "loop":
        run.symlink_to(run)
    elif kind == "dangling":
        run.symlink_to(tmp_path / "nowhere")
    else:
        run = tmp_path / ("r" * 5000)
    for resume in ((), ("--resume=auto",)):
        refusal = threefold("train", config_file, "--run-dir", run, *resume).refusal
        assert refusal.startswith("Error: --run-dir is ")
        assert len(refusal) < 400
