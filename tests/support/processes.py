"""Processes of a test: check whether they run, and wait for their end."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

BOUND = 150.0
"""Seconds after which processes that should have ended count as endless."""


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids_of(folder: Path) -> list[int]:
    """Return the ids of the ranks that have written them to `pid_RANK` of a folder."""
    return [int(file.read_text()) for file in folder.glob("pid_*")]


def assert_gone(pids: Iterable[int]) -> None:
    """Assert that no process of these ids runs (one may still be a zombie)."""
    assert not any(map(runs, pids))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def errors_of(
    processes: Sequence[subprocess.Popen[str]], others: Callable[[], Iterable[int]], bound: float = BOUND
) -> list[str]:
    """Wait until all processes have ended; return the standard error of each, or kill them and fail on timeout.

    Args:
        others: ids of the processes that these have started.
    """
    deadline = time.monotonic() + bound
    try:
        return [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[1] for process in processes]
    except subprocess.TimeoutExpired:
        left = [pid for pid in others() if runs(pid)]
        for process in processes:
            process.kill()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail(f"{bound:g} s later not all processes have ended; still there were the ranks {left}")
