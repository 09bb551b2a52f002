"""Measure durations without the time in which the acting processes wait for a CPU."""

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

INTERVAL = 0.2
"""Seconds between two samples."""


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._sampler.join()

    def seconds_since(self, start: float) -> float:
        """Return the seconds since `start` (of `time.monotonic`) in which these processes did not wait for a CPU."""
        before = [total for when, total in self._samples if when <= start]
        now, total = self._sample()
        return now - start - (total - (before[-1] if before else self._samples[0][1]))

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
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
