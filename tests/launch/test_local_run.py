"""Runs of which one rank stops, hangs or lacks something: the message names it, where it is, and who waits for it."""

import math
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.launch.faulty_runs import (
    DEADLINE,
    STOPPED,
    TIMEOUT,
    end,
    started,
    train_command,
    wait_until_stopped,
    write_config,
)
from tests.support.processes import CpuWaits, pids_of
from tests.train.support import Run

LATEST = TIMEOUT + 2 + 3
"""Seconds from the moment at which a rank stops until all has ended: the message comes after `TIMEOUT` + 2."""


SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep


@pytest.mark.parametrize(
    ("section", "activity", "layout", "rank", "place", "waits"),
    [
        ("STEP", "FORWARD", {"pp": 2}, 1, "in the forward pass of micro-batch ", "send over pp"),
        pytest.param("SAVE", "", {"dp": 2}, 1, "in the save after step 2", "", marks=SLOW),
        pytest.param("START", "", {"dp": 2}, 1, " in start-up", "", marks=SWEEP),
        pytest.param("STEP", "CALLBACK", {"dp": 2}, 0, "in the callback ", "", marks=SWEEP),
        pytest.param("STEP", "GRADIENT_SUM", {"dp": 2}, 1, "in the gradient sum in step ", "all_reduce ", marks=SWEEP),
        pytest.param("EVALUATION", "FORWARD", {"dp": 2}, 1, "in the forward pass of ", "all_reduce ", marks=SWEEP),
    ],
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


@pytest.mark.parametrize("layout", [pytest.param({"pp": 2}, marks=SLOW), pytest.param({"tp": 2, "pp": 2}, marks=SWEEP)])
def test_a_rank_that_is_killed_is_named(small_run: Run, tmp_path: Path, layout: dict[str, int]) -> None:
    """The last one, while others wait for what it sends: all end before the timeout, and one sentence says it."""
    ranks = math.prod(layout.values())
    rank = ranks - 1
    here = {"rank": rank, "section": "STEP", "activity": "FORWARD", "step": 2}
    config = write_config(small_run.but(**layout), tmp_path, "StopAt", **here)
    with started([train_command(config, tmp_path)]) as processes:
        since = wait_until_stopped(processes, tmp_path, rank)
        with CpuWaits(processes[0].pid) as cpu:
            os.kill(int((tmp_path / "run" / f"pid_{rank}").read_text()), signal.SIGKILL)
            line = end(processes, tmp_path, ranks)
            seconds = cpu.seconds_since(since)
    assert line.startswith(f"Error: rank {rank} failed: its process was killed by SIGKILL, as when memory runs out")
    assert seconds < TIMEOUT


@pytest.mark.sweep
def test_a_rank_that_hangs_in_python_is_named(small_run: Run, tmp_path: Path) -> None:
    config = write_config(small_run.but(tp=2), tmp_path, "HangAt", rank=1, step=3)
    with started([train_command(config, tmp_path)]) as processes:
        line = end(processes, tmp_path, 2)
    assert line.startswith(f"Error: rank 1 failed: it has not answered for {TIMEOUT} s (train.timeout): it is in the ")
    assert "it is in the callback HangAt in step 3, and rank 0 waits for it in all_reduce over " in line


SAMPLES = '''
"""Samples of which rank 1 can read so many, as from a network disk that does not answer."""

import torch.distributed as dist


class Samples:
    seen = set()

    def __len__(self):
        return 64

    def __getitem__(self, number):
        if dist.is_initialized() and dist.get_rank() == 1:
            Samples.seen.add(number)
            if len(Samples.seen) > {reads}:
                open({disk!r}).close()
        return [(7 * number + place) % 300 for place in range(17)]
'''


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fault", "reads", "place"),
    [
        # The one that all ranks compare, and those of its rows of the first step.
        ("StopAt", 5, f"{STOPPED}reading data in step 2, "),
        ("HangAt", 5, "it is reading data in step 2, "),
        ("HangAt", 9, "it is reading data in the evaluation after step 2, "),  # behind the rows of the third step
    ],
)
def test_a_rank_that_reads_data_is_named(small_run: Run, tmp_path: Path, fault: str, reads: int, place: str) -> None:
    disk, file = tmp_path / "disk", tmp_path / "samples.py"
    os.mkfifo(disk)
    file.write_text(SAMPLES.format(reads=reads, disk=str(disk)))
    data = {"path": f"{file}:Samples", "sequence_length": 16, "split": "80,20"}
    here = (
        {"rank": 1, "section": "STEP", "activity": "DATA", "step": 2} if fault == "StopAt" else {"rank": -1, "step": 1}
    )
    config = write_config(small_run.but(dp=2, sections=(("data", data),)), tmp_path, fault, **here)
    with started([train_command(config, tmp_path)]) as processes:
        line = end(processes, tmp_path, 2)
    assert line.startswith(f"Error: rank 1 failed: it has not answered for {TIMEOUT} s (train.timeout): {place}")
    assert "and rank 0 waits for it in all_reduce over " in line


@pytest.mark.sweep
@pytest.mark.parametrize("child", [False, True])
def test_a_rank_that_computes_is_not_named(small_run: Run, tmp_path: Path, child: bool) -> None:
    """As a compilation that one rank alone makes, in its process or with a compiler."""
    here = {"rank": 1, "step": 3, "seconds": 1.5 * TIMEOUT, "child": child}
    config = write_config(small_run.but(dp=2), tmp_path, "Busy", **here)
    with started([train_command(config, tmp_path)]) as (process,):
        _, error = process.communicate(timeout=DEADLINE)
    assert (process.returncode, error) == (0, "")


@pytest.mark.sweep
def test_a_machine_that_sleeps_stops_the_clock(small_run: Run, tmp_path: Path) -> None:
    """As with a laptop that is closed, or Ctrl-Z: nothing of the run runs for longer than any timeout of it."""
    config = write_config(small_run.but(dp=2), tmp_path, "HangAt", steps=100, rank=-1, step=1)
    with started([train_command(config, tmp_path)]) as (process,):
        assert any(" 2/" in line for line in process.stdout or ())
        pids = [process.pid, *pids_of(tmp_path / "run")]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(5 * TIMEOUT)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        _, error = process.communicate(timeout=DEADLINE)
    assert (process.returncode, error) == (0, "")
