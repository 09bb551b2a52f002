"""Runs of which one rank stops, hangs or lacks something: the message names it, where it is, and who waits for it."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support.cpu_waits import CpuWaits
from tests.support.processes import runs
from tests.support.sweep import sweep
from tests.train.support import Run

HERE = Path(__file__).parent
TIMEOUT = 3
LATEST = TIMEOUT + 2
"""Seconds from the moment at which a rank stops until the message."""
DEADLINE = 240
STOPPED = "its process is stopped, as by SIGSTOP, "


def write_config(run: Run, folder: Path, fault: str, **arguments: object) -> Path:
    """The config of a run with a fault of `faults.py`, which takes 6 steps, evaluates after each second and saves."""
    sections = run.config.sections()
    sections["train"] |= {"timeout": float(TIMEOUT), "eval_every": 2, "max_steps": 6}
    sections["train"]["callbacks"] = [{"name": f"{HERE / 'faults.py'}:{fault}", **arguments}]
    sections["checkpoint"] |= {"every": 2}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@contextmanager
def started(config: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "threefold", "train", str(config), "--run-dir", str(folder / "run")]
    with subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def stopped_since(process: subprocess.Popen[str], folder: Path, rank: int) -> tuple[float, CpuWaits]:
    """Wait until the process of a rank is stopped, and return when."""
    deadline = time.monotonic() + DEADLINE
    file = folder / "run" / f"pid_{rank}"
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and (text := file.read_text()):
            status = Path(f"/proc/{text}/status")
            if "State:\tT" in (status.read_text() if status.exists() else ""):
                return time.monotonic(), CpuWaits(process.pid)
        time.sleep(0.01)
    pytest.fail(f"rank {rank} was never stopped; the run said {process.communicate()[1]}")


def sentence(process: subprocess.Popen[str], folder: Path) -> str:
    """The one line that the run said about its end; no process of it is left."""
    error = process.communicate(timeout=DEADLINE)[1]
    pids = [int(file.read_text()) for file in (folder / "run").glob("pid_*")]
    assert len(pids) >= 2
    assert not any(runs(pid) for pid in pids)
    assert process.returncode == 1
    (line,) = [line for line in error.splitlines() if line.startswith("Error: ")]
    return line


@sweep(
    ("section", "activity", "layout", "rank", "place", "waits"),
    [
        ("STEP", "FORWARD", {"pp": 2}, 1, "in the forward pass of micro-batch ", "send over pp"),
        ("START", "", {"dp": 2}, 1, "loading its starting point in start-up", "gather over world"),
        ("STEP", "DATA", {"dp": 2}, 0, "reading data in step ", "all_reduce over "),
        ("STEP", "GRADIENT_SUM", {"dp": 2}, 1, "in the gradient sum in step ", "all_reduce over dp"),
        ("STEP", "UPDATE", {"tp": 2}, 0, "in the update in step ", "all_reduce over "),
        ("EVALUATION", "FORWARD", {"dp": 2}, 1, "in the forward pass of micro-batch ", "all_reduce over world"),
        ("SAVE", "", {"dp": 2}, 1, "in the save after step 2", "gather over world"),
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
    with started(config, tmp_path) as process:
        since, cpu = stopped_since(process, tmp_path, rank)
        with cpu:
            line = sentence(process, tmp_path)
            seconds = cpu.seconds_since(since)
    assert line.startswith(
        f"Error: rank {rank} failed: it has not answered for {TIMEOUT} s (train.timeout): {STOPPED}{place}"
    )
    assert f"rank {1 - rank} waits for it in {waits}" in line
    assert seconds <= LATEST + 3  # in which the processes end
