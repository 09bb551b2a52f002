"""The same of ranks that launchers started: two agents of torchrun, as on two hosts, and Slurm's srun."""

import os
from pathlib import Path

import pytest

from tests.launch.faulty_runs import STOPPED, TIMEOUT, end, started, train_command, wait_until_stopped, write_config
from tests.support.processes import free_port
from tests.train.support import Run

AGENT = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]


@pytest.mark.parametrize(
    ("rank", "section"),
    [pytest.param(0, "STEP", marks=pytest.mark.slow), pytest.param(1, "EVALUATION", marks=pytest.mark.sweep)],
)
def test_a_stopped_rank_under_two_agents(small_run: Run, tmp_path: Path, rank: int, section: str) -> None:
    config = write_config(
        small_run.but(dp=2), tmp_path, "StopAt", rank=rank, section=section, activity="FORWARD", step=2
    )
    here = [*AGENT, "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "hang"]
    command = [*here, *train_command(config, tmp_path)]
    with started([command, command], [{}, {}]) as agents:
        wait_until_stopped(agents, tmp_path, rank)
        line = end(agents, tmp_path, 2)
    begin = f"Error: rank {rank} failed: it has not answered for {TIMEOUT} s (train.timeout): {STOPPED}last heard of "
    assert line.startswith(begin)  # where it was as it last told, which may be before its step
    assert f"rank {1 - rank} waits for it in all_reduce over " in line


@pytest.mark.sweep
def test_the_stopped_rank_holds_the_store(small_run: Run, tmp_path: Path) -> None:
    """Under Slurm that is rank 0; the others end by their own clocks."""
    config = write_config(small_run.but(dp=2), tmp_path, "StopAt", rank=0, section="STEP", activity="FORWARD", step=2)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    slurm["SLURM_STEP_NODELIST"] = "localhost"
    ranks = [{**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    with started([train_command(config, tmp_path)] * 2, ranks) as processes:
        wait_until_stopped(processes, tmp_path, 0)
        error = processes[1].communicate(timeout=240)[1]
        assert processes[1].returncode == 1
    (line,) = [line for line in error.splitlines() if line.startswith("Error: ")]
    assert line.startswith(f"Error: rank 0 failed: its host has not answered for {TIMEOUT} s (train.timeout): ")
    assert "rank 1 waits in all_reduce over " in line
