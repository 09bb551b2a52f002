"""Runs of which one rank stops, hangs or lacks something: the message names it, where it is, and who waits for it."""

from pathlib import Path

import pytest

from tests.support.cpu_waits import CpuWaits
from tests.support.faulty_runs import STOPPED, TIMEOUT, end, started, train_command, wait_until_stopped, write_config
from tests.support.sweep import sweep
from tests.train.support import Run

LATEST = TIMEOUT + 2 + 3
"""Seconds from the moment at which a rank stops until all has ended: the message comes after `TIMEOUT` + 2."""


@sweep(
    ("section", "activity", "layout", "rank", "place", "waits"),
    [
        ("STEP", "FORWARD", {"pp": 2}, 1, "in the forward pass of micro-batch ", "send over pp"),
        ("START", "", {"dp": 2}, 1, " in start-up", ""),
        ("STEP", "CALLBACK", {"dp": 2}, 0, "in the callback ", ""),
        ("STEP", "GRADIENT_SUM", {"dp": 2}, 1, "in the gradient sum in step ", "all_reduce over "),
        ("EVALUATION", "FORWARD", {"dp": 2}, 1, "in the forward pass of micro-batch ", "all_reduce over world"),
        ("SAVE", "", {"dp": 2}, 1, "in the save after step 2", ""),
    ],
    quick=(0,),
)
def test_a_stopped_rank_is_named(
    small_run: Run,
    tmp_path: Path,
    section: str,
    activity: str,
    layout: dict[str, int],
    rank: int,
    place: str,
    waits: str,
) -> None:
    config = write_config(
        small_run.but(**layout), tmp_path, "StopAt", rank=rank, section=section, activity=activity, step=2
    )
    with started([train_command(config, tmp_path)]) as processes:
        since = wait_until_stopped(processes, tmp_path, rank)
        with CpuWaits(processes[0].pid) as cpu:
            line = end(processes, tmp_path, 2)
            seconds = cpu.seconds_since(since)
    begin = f"Error: rank {rank} failed: it has not answered for {TIMEOUT} s (train.timeout): {STOPPED}in "
    assert line.startswith(begin)
    assert place in line
    assert f"rank {1 - rank} waits for it in {waits}" in line
    assert seconds <= LATEST


@pytest.mark.slow
def test_a_rank_that_hangs_in_python_is_named(small_run: Run, tmp_path: Path) -> None:
    config = write_config(small_run.but(tp=2), tmp_path, "HangAt", rank=1, step=3)
    with started([train_command(config, tmp_path)]) as processes:
        line = end(processes, tmp_path, 2)
    assert line.startswith(f"Error: rank 1 failed: it has not answered for {TIMEOUT} s (train.timeout): it is in the ")
    assert "it is in the callback HangAt in step 3, and rank 0 waits for it in all_reduce over " in line


@pytest.mark.slow
def test_a_rank_without_memory(small_run: Run, tmp_path: Path) -> None:
    config = write_config(small_run.but(dp=2), tmp_path, "Limit", rank=1, what="memory")
    with started([train_command(config, tmp_path)]) as processes:
        line = end(processes, tmp_path, 2)
    assert line.startswith("Error: ")
    assert "annot allocate memory" in line
    assert "rank 1" in line
