"""`threefold train` under launchers, up to the point where training starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


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
    ended = subprocess.run([*launcher, *command], text=True, capture_output=True, timeout=100)
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
        timeout=100,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("Error: The layout dp 1 · tp 1 · pp 1 needs 1 ranks but the world has 2;")
