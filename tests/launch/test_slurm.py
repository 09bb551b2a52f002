"""Ranks as Slurm's srun would start them, told by its environment variables where they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.launch.output import failure_file, log_file

HERE = Path(__file__).parent
RUN = """
import sys
from pathlib import Path
import workers
from threefold.launch import RankFailed, run
folder = Path({folder!r})
try:
    run(workers.{worker}, (folder,), 2, run_dir=folder)
except RankFailed as error:
    sys.exit(f"RankFailed: {{error}}")
"""


def step(folder: Path, worker: str) -> list[subprocess.Popen[str]]:
    """The ranks of a job step."""
    variables = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    environment = {**os.environ, **variables, "PYTHONPATH": str(HERE)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RUN.format(folder=str(folder), worker=worker)],
            env={**environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]


@pytest.mark.slow
def test_ranks_meet_on_the_first_host(tmp_path: Path) -> None:
    ranks = step(tmp_path, "report_sum")
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    assert [(tmp_path / f"sum_{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert "hello from 1" in log_file(tmp_path, 1).read_text()


@pytest.mark.slow
def test_a_rank_that_fails_after_rank_0_has_left_reports_its_own_failure(tmp_path: Path) -> None:
    """It cannot reach the store either, but that is not why it failed; a report of an earlier run does not count."""
    failure_file(tmp_path).parent.mkdir()
    failure_file(tmp_path).write_text("rank 1 failed: an earlier run\n")
    first, second = step(tmp_path, "outlive_rank_zero")
    assert second.communicate(timeout=600)[1].splitlines()[-1] == (
        f"RankFailed: rank 1 failed: ValueError: the cat sat on the keyboard (log: {log_file(tmp_path, 1)})"
    )
    assert first.wait(timeout=300) == 0
    assert failure_file(tmp_path).read_text().startswith("rank 1 failed: ValueError: the cat")
