"""Processes of a test: whether they are still there, and their end."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

BOUND = 150.0
"""Seconds after which processes that ought to have ended are taken to go on for ever."""


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def errors_of(
    processes: Sequence[subprocess.Popen[str]], others: Callable[[], Iterable[int]], bound: float = BOUND
) -> list[str]:
    """What each process has written to standard error when all have ended; the test fails, and they are killed, where
    they do not end in time.

    Args:
        others: the ids of the processes that these have started.
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
