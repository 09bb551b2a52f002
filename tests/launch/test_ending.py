"""Ranks of every launcher meet, and all have ended ten seconds after a failure; by the clock of real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ready
from tests.support.processes import CpuWaits, assert_gone, errors_of, pids_of
from tests.support.sweep import sweep
from threefold.launch.output import failure_file, log_file

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
        run(workers.{worker}, {args}, {ranks}, run_dir=folder / "run")
    except RankFailed as error:
        sys.exit(f"RankFailed: {{error}}")
"""


def started(launcher: str, folder: Path, worker: str, args: str, ranks: int = RANKS) -> list[subprocess.Popen[str]]:
    """The processes that a user of the launcher starts: one, or under Slurm, which starts them itself, each rank."""
    script = folder / "running.py"
    script.write_text(RUN.format(folder=str(folder), worker=worker, args=args, ranks=ranks))
    command, here = [sys.executable, str(script)], {"PYTHONPATH": str(HERE)}
    if launcher == "local":
        return [ready.ReadyProcess(command, env={**os.environ, **here})]
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *torchrun, str(script)]
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(ranks)}
    step["SLURM_STEP_NODELIST"] = "localhost"
    each = [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **variables, **here},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for variables in (each if launcher == "slurm" else [{}])
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
    processes = started(launcher, tmp_path, "fail", f"(folder, {rank}, {how!r}, {others!r})")
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


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_ranks_meet_and_log(tmp_path: Path, launcher: str) -> None:
    processes = started(launcher, tmp_path, "report_sum", "(folder,)", 2)
    printed = "".join(process.communicate(timeout=300)[0] for process in processes)
    assert {process.returncode for process in processes} == {0}
    assert printed == "hello from 0\nnative words of 0\n"
    for rank in range(2):
        assert (tmp_path / f"sum_{rank}").read_text() == "1"
        assert log_file(tmp_path / "run", rank).read_text() == f"hello from {rank}\nnative words of {rank}\n"


@pytest.mark.slow
def test_a_rank_that_fails_after_rank_0_has_left_reports_its_own_failure(tmp_path: Path) -> None:
    """It cannot reach the store either, but that is not why it failed; a report of an earlier run does not count."""
    report, log = failure_file(tmp_path / "run"), log_file(tmp_path / "run", 1)
    report.parent.mkdir(parents=True)
    report.write_text("rank 1 failed: an earlier run\n")
    first, second = started("slurm", tmp_path, "outlive_rank_zero", "(folder,)", 2)
    assert second.communicate(timeout=600)[1].splitlines()[-1] == (
        f"RankFailed: rank 1 failed: ValueError: the cat sat on the keyboard (log: {log})"
    )
    assert first.wait(timeout=300) == 0
    assert report.read_text().startswith("rank 1 failed: ValueError: the cat")
    assert "Traceback" in log.read_text()
