"""Processes of a test: check whether they run, and wait for their end."""

import os
import signal
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
