"""All ranks have ended ten seconds after the first failure, whoever started them; by the clock of real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ready
from tests.support.processes import CpuWaits, assert_gone, errors_of, pids_of
from tests.support.sweep import sweep
from threefold.launch.output import log_file

HERE = Path(__file__).parent
LIMIT = 10.0
"""Seconds from the failure of a rank until the last process of the run has ended."""
RANKS = 3
RUN = """
import sys
from pathlib import Path
import workers
from threefold.launch import RankFailed, run
if __name__ == "__main__":
    folder = Path({folder!r})
    try:
        run(workers.fail, (folder, {rank}, {how!r}, {others!r}), {ranks}, run_dir=folder / "run")
    except RankFailed as error:
        sys.exit(f"RankFailed: {{error}}")
"""


def started(launcher: str, script: Path) -> list[subprocess.Popen[str]]:
    """The processes that a user of the launcher starts: one, or under Slurm, which starts them itself, each rank."""
    command, here = [sys.executable, str(script)], {"PYTHONPATH": str(HERE)}
    if launcher == "local":
        return [ready.ReadyProcess(command, env={**os.environ, **here})]
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [sys.executable, *torchrun, str(script)]
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(RANKS),
        "SLURM_STEP_NODELIST": "localhost",
    }
    ranks = [{**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(RANKS)]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **variables, **here},
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for variables in (ranks if launcher == "slurm" else [{}])
    ]


COLLECTIVE, NOTHING = "in a collective", "for nothing"


@sweep(
    ("launcher", "how", "rank", "others"),
    [
        ("local", "kill", 1, NOTHING),
        ("local", "kill", 0, COLLECTIVE),
        ("local", "raise", 1, COLLECTIVE),
        pytest.param("torchrun", "kill", 1, COLLECTIVE, marks=pytest.mark.sweep),
        ("torchrun", "kill", 0, COLLECTIVE),
        pytest.param("torchrun", "kill", 1, NOTHING, marks=pytest.mark.sweep),
        ("torchrun", "raise", 1, COLLECTIVE),
        pytest.param("torchrun", "raise", 0, NOTHING, marks=pytest.mark.sweep),
        pytest.param("slurm", "kill", 1, COLLECTIVE, marks=pytest.mark.sweep),
        ("slurm", "kill", 0, COLLECTIVE),
        pytest.param("slurm", "raise", 1, COLLECTIVE, marks=pytest.mark.sweep),
        pytest.param("slurm", "raise", 0, COLLECTIVE, marks=pytest.mark.sweep),
    ],
    quick=(0,),
)
def test_all_ranks_end(tmp_path: Path, launcher: str, how: str, rank: int, others: str) -> None:
    script = tmp_path / "running.py"
    script.write_text(RUN.format(folder=str(tmp_path), rank=rank, how=how, others=others, ranks=RANKS))
    processes = started(launcher, script)
    with CpuWaits(*(process.pid for process in processes)) as waits:
        errors = errors_of(processes, lambda: pids_of(tmp_path))
        assert waits.seconds_since(float((tmp_path / "failed_at").read_text())) <= LIMIT
    assert len(pids_of(tmp_path)) == RANKS
    assert_gone(pids_of(tmp_path))
    assert all(process.returncode for process in processes)
    told = [line for error in errors for line in error.splitlines() if line.startswith("RankFailed: ")]
    assert len(told) <= 1
    if how == "raise":
        assert told[0].startswith(f"RankFailed: rank {rank} failed: ValueError: the cat sat on the keyboard (log: ")
    elif launcher == "local":
        assert told[0].startswith(f"RankFailed: rank {rank} failed: its process was killed by SIGKILL")
    elif (launcher, rank) == ("slurm", 0):
        assert told[0].startswith("RankFailed: rank 0 failed: its process ended without a report, or its host is out ")
        assert told[0].endswith(f"(log: {log_file(tmp_path / 'run', 0)})")
    elif launcher == "slurm":
        assert told[0].startswith("RankFailed: a rank failed: its process ended without a report, or its host is out ")
    elif launcher == "torchrun":
        assert f"(local_rank: {rank})" in errors[0]
        assert "Signal 9 (SIGKILL)" in errors[0]
