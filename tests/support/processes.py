"""Processes of a test: check whether they run, wait for their end, and measure how long they wait for a CPU."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

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


class CpuWaits:
    """Sample how long the threads of some processes wait for a CPU (where Linux counts it), within the block.

    A limit of seconds then holds on a busy machine too; a wait for anything but a CPU exceeds it as on an idle one.

    Args:
        pids: ids of processes besides this one. Their waits remain known when they have ended.
    """

    def __init__(self, *pids: int) -> None:
        self._pids, self._ended = (os.getpid(), *pids), threading.Event()
        self._waited: dict[str, int] = {}
        self._samples: list[tuple[float, float]] = []
        self._sampler = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._sampler.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._sampler.join()

    def seconds_since(self, start: float) -> float:
        """Return the seconds since `start` (of `time.monotonic`) in which these processes did not wait for a CPU."""
        before = [total for when, total in self._samples if when <= start]
        now, total = self._sample()
        return now - start - (total - (before[-1] if before else self._samples[0][1]))

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self._sample()

    def _sample(self) -> tuple[float, float]:
        now = time.monotonic()
        for pid in self._pids:
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    self._waited[thread.name] = int((thread / "schedstat").read_text().split()[1])
                except (OSError, IndexError, ValueError):  # the process has ended
                    continue
        self._samples.append((now, sum(self._waited.copy().values()) / 1e9))
        return self._samples[-1]
