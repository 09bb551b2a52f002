"""Start runs with a fault of `tests/launch/callback_faults.py` as a user does, and watch until all processes end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support import ready
from tests.support.processes import assert_gone, pids_of
from tests.train.support import Run

TIMEOUT = 6
"""Seconds of `train.timeout`: longer than an import takes on a busy machine."""
DEADLINE = 240
"""Most seconds that a test waits for anything."""
STOPPED = "its process is stopped, as by SIGSTOP, "


def write_config(run: Run, folder: Path, fault: str, restarts: int = 0, steps: int = 6, **arguments: object) -> Path:
    """Write the config of a run with a fault that evaluates and saves every second step; return its path."""
    sections = run.config.sections()
    sections["train"] |= {"timeout": float(TIMEOUT), "eval_every": 2, "max_steps": steps, "max_restarts": restarts}
    sections["train"]["callbacks"] = [
        {"name": f"{Path(__file__).with_name('callback_faults.py')}:{fault}", **arguments}
    ]
    sections["checkpoint"] |= {"every": 2}
    folder.mkdir(exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def train_command(config: Path, folder: Path) -> list[str]:
    return ["-m", "threefold", "train", str(config), "--run-dir", str(folder / "run")]


@contextmanager
def started(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]] = ({},)
) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield Python processes with these arguments and further environment variables; kill them on exit."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for command, variables in zip(commands, environments, strict=True):
            arguments, environment = [sys.executable, *command], {**os.environ, **variables}
            pipe = subprocess.PIPE
            if not variables and command[1] == "threefold":
                processes.append(ready.ReadyProcess(arguments))
                continue
            processes.append(subprocess.Popen(arguments, env=environment, text=True, stdout=pipe, stderr=pipe))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_until_stopped(processes: Sequence[subprocess.Popen[str]], folder: Path, rank: int) -> float:
    """Wait until the process of a rank is stopped, and return the time."""
    deadline = time.monotonic() + DEADLINE
    file = folder / "run" / f"pid_{rank}"
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if file.exists() and (text := file.read_text()):
            status = Path(f"/proc/{text}/status")
            if "State:\tT" in (status.read_text() if status.exists() else ""):
                return time.monotonic()
        time.sleep(0.01)
    for process in processes:
        process.kill()
    pytest.fail(f"rank {rank} was never stopped: {[process.communicate() for process in processes]}")


def end(processes: Sequence[subprocess.Popen[str]], folder: Path, ranks: int) -> str:
    """Wait until all processes have ended in failure with none left; return the only error line."""
    errors = "".join(process.communicate(timeout=DEADLINE)[1] for process in processes)
    pids = pids_of(folder / "run")
    assert len(pids) == ranks
    assert_gone(pids)
    assert all(process.returncode for process in processes)
    lines = [line for line in errors.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, errors
    return lines[0]
