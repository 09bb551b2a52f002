"""Ranks as Slurm's srun would start them, told by its environment variables where they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.launch.output import log_file

HERE = Path(__file__).parent
RUN = """
from pathlib import Path
import workers
from threefold.launch import run
folder = Path({folder!r})
run(workers.report_sum, (folder,), 2, run_dir=folder)
"""


@pytest.mark.slow
def test_ranks_meet_on_the_first_host(tmp_path: Path) -> None:
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN.format(folder=str(tmp_path))],
            env={**os.environ, **step, "PYTHONPATH": str(HERE), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    assert [(tmp_path / f"sum_{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert "hello from 1" in log_file(tmp_path, 1).read_text()
