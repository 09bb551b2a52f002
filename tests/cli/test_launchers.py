"""`threefold train` under launchers: what they start wrongly is refused, and all ranks end with the first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runs import command, read_until, start
from tests.support.processes import CpuWaits, errors_of


@pytest.mark.slow
def test_world_of_another_size_is_told_by_one_rank(config_file: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [
        "-m",
        "threefold",
        "train",
        str(config_file),
        "--run-dir",
        str(tmp_path / "run"),
        "--set",
        "parallel.tp=2",
    ]
    ended = subprocess.run([*launcher, *command], text=True, capture_output=True, timeout=300)
    assert ended.returncode != 0
    told = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert len(told) == 1
    assert "The world has 3 ranks" in told[0]
    assert "start 4 ranks" in told[0]
    assert not (tmp_path / "run").exists()


def test_slurm_ranks_are_checked_too(config_file: Path, tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    ended = subprocess.run(
        [sys.executable, "-m", "threefold", "train", str(config_file), "--run-dir", str(tmp_path / "run")],
        env={**os.environ, **slurm, "SLURM_STEP_NODELIST": "localhost"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "Error: The layout dp 1 · tp 1 · pp 1 needs 1 rank but the world has 2 (SLURM_PROCID=0 and SLURM_NTASKS=2 are "
        "set, which `env -u SLURM_STEP_ID COMMAND` is without); set parallel.dp to 2 or start 1 rank.\n"
    )


def processes_of(run: Path) -> dict[int, int]:
    """Processes with this run folder on their command line, but for the launcher's own, and the parent of each."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if str(run).encode() in words and b"torch.distributed.run" not in words:
            found[int(folder.name)] = int(parent)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_all_ranks_of_a_training_run_end_when_one_is_killed(config_file: Path, tmp_path: Path, launcher: str) -> None:
    """Within ten seconds, in the middle of its steps. The local launcher's is in test_train.py."""
    run = tmp_path / "run"
    endless = ("--set", "train.max_steps=1000000", "--set", "log.every=1", "--set", "train.eval_every=0")
    arguments = command(config_file, run, *endless, "--set", "parallel.dp=3", "--set", "train.global_batch_size=6")
    if launcher == "torchrun":
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
        processes = [start([arguments[0], *torchrun, *arguments[1:]])]
    else:
        slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"}
        slurm["SLURM_STEP_NODELIST"] = "localhost"
        own = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)]
        processes = [start(arguments, env={**os.environ, **slurm, **each}) for each in own]
    read_until(processes[0], " 2/")
    found = processes_of(run)
    ranks = [process for process, parent in found.items() if parent not in found]  # not those that copy their output
    assert len(ranks) == 3
    with CpuWaits(*(process.pid for process in processes)) as waits:
        killed = time.monotonic()
        os.kill(max(ranks), signal.SIGKILL)
        errors_of(processes, lambda: processes_of(run))
        assert waits.seconds_since(killed) <= 10
    assert all(process.returncode != 0 for process in processes)
    assert processes_of(run) == {}
