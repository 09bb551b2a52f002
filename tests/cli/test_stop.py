"""SIGINT and SIGTERM to runs of `threefold train`, at any moment."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runs import children, command, end_of, losses, read_until, start, start_ready, wait_for
from tests.support import ready
from tests.support.sweep import sweep

LONG = tuple(
    word
    for setting in ("train.max_steps=1000000", "log.every=1", "train.eval_every=0", "checkpoint.every=0")
    for word in ("--set", setting)
)
"""A run that only a signal ends, and that saves nothing before it."""
LONG_EVALUATION = tuple(
    word
    for setting in (
        "train.eval_batches=1000000",
        "train.global_batch_size=1",
        "data.split='1,9'",
        "data.sequence_length=2",
    )
    for word in ("--set", setting)
)
"""An evaluation of thousands of batches."""


def saved_step(output: str, name: str, run: Path) -> int:
    """The step after which a run says that it was stopped, having checked all that it says."""
    told = output.splitlines()
    explained = [number for number, line in enumerate(told) if line.startswith(f"Stopped by {name} ")]
    assert len(explained) == 1, output
    words = told[explained[0]].removesuffix("; resume with:")
    before, _, path = words.partition(", which is saved in ")
    step = int(before.rpartition(" ")[2].replace(",", ""))
    assert Path(path) == run / "checkpoints" / f"step_{step:08d}"
    assert (Path(path) / "checkpoint.json").exists()
    return step


def continued(output: str, *more: str) -> list[str]:
    """The command line that a stopped run says to type."""
    words = shlex.split(output.splitlines()[-1])
    assert words[0] == "threefold"
    assert "--resume" in words
    return [sys.executable, "-m", *words, *more]


@sweep(
    ("ranks", "number", "status", "to_group"), [(1, signal.SIGTERM, 0, False), (2, signal.SIGINT, 130, True)], slow=(1,)
)
def test_signal_saves_and_the_run_continues_bit_for_bit(
    config_file: Path, tmp_path: Path, ranks: int, number: signal.Signals, status: int, to_group: bool
) -> None:
    run, layout = tmp_path / "run", ("--set", f"parallel.dp={ranks}")
    process = start(command(config_file, run, *LONG, *layout))
    read_until(process, " 3/")
    (os.killpg if to_group else os.kill)(process.pid, number)
    code, output, error = end_of(process)
    assert (code, error) == (status, "")
    step = saved_step(output, number.name, run)
    assert [number for number, _ in losses(run)] == list(range(1, step + 1))

    options = ("--set", f"train.max_steps={step + 3}", "--set", "optimizer.decay_steps=1000000")
    resumed = ready.run(continued(output, *options))
    assert resumed.returncode == 0, resumed.stderr
    whole = ready.run(command(config_file, tmp_path / "whole", *LONG, *layout, *options))
    assert whole.returncode == 0
    assert losses(run) == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_every_process_of_the_run(config_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    """As some schedulers send it: to the parent and to each rank. `sbatch --signal=USR1@120` does."""
    run = tmp_path / "run"
    process = start_ready(command(config_file, run, *LONG, "--set", "parallel.pp=2"))
    read_until(process, " 2/")
    os.killpg(process.pid, number)
    code, output, error = end_of(process)
    assert (code, error) == (0, "")
    saved_step(output, number.name, run)


@pytest.mark.sweep
def test_signal_to_the_agent_of_torchrun(config_file: Path, tmp_path: Path) -> None:
    """It passes SIGUSR1 on where it is told to handle it; else the signal would end it."""
    run, handled = tmp_path / "run", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--signals-to-handle", handled)
    python, *arguments = command(config_file, run, *LONG, "--set", "parallel.dp=2")
    process = start([python, *agent, "--shutdown-timeout", "120", *arguments])
    read_until(process, " 2/")
    process.send_signal(signal.SIGUSR1)
    _, output, _ = end_of(process)
    saved_step(output, "SIGTERM", run)  # which of the two it was is not exchanged


@pytest.mark.slow
def test_time_limit_saves_and_the_run_continues_on_an_empty_disk(config_file: Path, tmp_path: Path) -> None:
    """With a copy of its checkpoints at an address, where the command that it prints finds the last one."""
    for seconds in (8, 60, 300):  # the first is enough for a step unless the machine is very busy
        run, there = tmp_path / f"run_{seconds}", tmp_path / f"there_{seconds}"
        remote = ("--set", f"checkpoint.remote=file://{there}", "--set", "checkpoint.async_save=true")
        limit = ("--set", f"train.max_seconds={seconds}", "--set", "parallel.dp=2")
        process = start_ready(command(config_file, run, *LONG, *remote, *limit))
        code, output, error = end_of(process)
        assert (code, error) == (0, "")
        if losses(run):
            break
        assert f"Stopped by train.max_seconds {seconds} before the first step" in output
    step = saved_step(output, f"train.max_seconds {seconds}", run)
    shutil.rmtree(run / "checkpoints")
    more = ("--set", f"train.max_steps={step + 2}", "--set", "train.max_seconds=null")
    resumed = ready.run(continued(output, *more))
    assert resumed.returncode == 0, resumed.stderr
    assert [number for number, _ in losses(run)] == list(range(1, step + 3))
    kept = ["owner.json", f"step_{step:08d}", f"step_{step + 2:08d}"]
    assert sorted(path.name for path in there.iterdir()) == kept


@pytest.mark.slow
def test_second_signal_ends_at_once(config_file: Path, tmp_path: Path) -> None:
    """Although a rank never finishes its step: it is stopped."""
    process = start_ready(command(config_file, tmp_path / "run", *LONG, "--set", "parallel.dp=2"))
    read_until(process, " 2/")
    ranks = children(process.pid)
    os.kill(ranks[-1], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=5)  # signals within a second of the first are taken for one
    process.send_signal(signal.SIGINT)
    code, output, error = end_of(process)
    assert (code, error) == (130, "")
    assert "Ended at once by a second SIGINT, without saving; there is no checkpoint; start again with:" in output
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.sweep
@pytest.mark.skipif(not shutil.which("c++"), reason="train.compile needs a C++ compiler")
@pytest.mark.parametrize("to_group", [False, True])
def test_signal_while_the_model_is_compiled(config_file: Path, tmp_path: Path, to_group: bool) -> None:
    """In the first step, which is finished, with compilers of its own at work as the signal comes, to them too."""
    run, cache = tmp_path / "run", tmp_path / "compiled"
    process = start(
        command(config_file, run, *LONG, "--set", "train.compile=true", "--set", "model.num_layers=1"),
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )
    wait_for(lambda: any(cache.rglob("*.cpp")), process)
    assert not (run / "metrics.jsonl").read_text(), "the first step is made already"
    (os.killpg if to_group else os.kill)(process.pid, signal.SIGTERM)
    code, output, error = end_of(process)
    assert (code, error) == (0, "")
    assert saved_step(output, "SIGTERM", run) == 1
    assert [step for step, _ in losses(run)] == [1]


@pytest.mark.slow
def test_run_whose_last_step_is_made_ends_normally(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_ready(command(config_file, run, *LONG_EVALUATION, "--set", "train.max_steps=1"))
    read_until(process, " 1/")
    process.send_signal(signal.SIGINT)
    code, output, error = end_of(process)
    assert (code, error) == (0, "")
    assert "Stopped" not in output
    assert (run / "checkpoints" / "step_00000001").exists()


@pytest.mark.slow
def test_deleted_run_folder_is_one_sentence(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_ready(command(config_file, run, *LONG, "--set", "parallel.dp=2"))
    read_until(process, " 2/")
    run.rename(tmp_path / "elsewhere")
    code, _, error = end_of(process)
    assert code == 2
    assert error.startswith(f"Error: The run's folder {run} was deleted or replaced while the run was writing to it")
    assert error.count("\n") == 1
    assert not run.exists()
