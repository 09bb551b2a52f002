"""Callbacks, named by import path, that stop, hang or slow a rank's process at one point of a run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from threefold.comm.heartbeat import Activity, RunSection
from threefold.resilience.heartbeat import PageHeartbeat
from threefold.resilience.rank_state import read
from threefold.train.callbacks.base import Callback, RunContext


class OfRank(Callback):
    """Act on one rank before a step; every rank writes its process id to the run's folder."""

    ranks = "all"

    def __init__(self, rank: int, step: int = 1) -> None:
        self.rank, self.step = rank, step

    def setup(self, run: RunContext) -> None:
        self.here = run.mesh.rank == self.rank
        (run.run_dir / f"pid_{run.mesh.rank}").write_text(str(os.getpid()))

    def before_step(self, step: int, batch: Any) -> None:
        if self.here and step == self.step:
            self.act()

    def act(self) -> None: ...


class StopAt(OfRank):
    """Stop the process of a rank with SIGSTOP in one section and activity, from a step on.

    Another thread sends the signal; no other thread runs Python between its check and the signal.

    Args:
        rank: rank whose process is stopped.
        section, activity: names of `RunSection` and `Activity`.
        step: first step of the section.
    """

    def __init__(self, rank: int, section: str, activity: str = "", step: int = 1) -> None:
        super().__init__(rank, step)
        self.section, self.activity = RunSection[section], Activity[activity] if activity else None

    def setup(self, run: RunContext) -> None:
        super().setup(run)
        if self.here and self.section is RunSection.START:
            _stop()
        elif self.here:
            threading.Thread(target=self._watch, args=(run.mesh.heartbeat,), daemon=True).start()

    def _watch(self, heartbeat: PageHeartbeat) -> None:
        sys.setswitchinterval(100.0)
        while True:
            time.sleep(0)
            place = read(heartbeat.content())
            here = place.section is self.section and place.step >= self.step
            if here and self.activity in (None, place.activity):
                _stop()
                return


def _stop() -> None:
    """Stop the process by a signal to the training thread, which cannot continue before it takes the signal."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGSTOP)


class HangAt(OfRank):
    def act(self) -> None:
        threading.Event().wait()


class Busy(OfRank):
    """Compute on one rank before a step, like a compilation, in the rank itself or in a child that it waits for.

    Args:
        seconds: processor time.
        child: whether to compute in a child process.
    """

    def __init__(self, rank: int, step: int, seconds: float, child: bool) -> None:
        super().__init__(rank, step)
        self.seconds, self.child = seconds, child

    def act(self) -> None:
        if self.child:
            work = f"import time\nwhile time.process_time() < {self.seconds}: pass"
            subprocess.run([sys.executable, "-c", work], check=True)
        else:
            until = time.process_time() + self.seconds
            while time.process_time() < until:
                pass


class Slow(OfRank):
    """Sleep on one rank before each step."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(rank)
        self.seconds = seconds

    def before_step(self, step: int, batch: Any) -> None:
        if self.here:
            time.sleep(self.seconds)


def _fill_memory() -> Iterator[Any]:
    """Yield tensors that fill the free memory of the process, so that its next one does not fit."""
    import torch

    for size in (1 << 20, 1 << 16, 1 << 14):
        with suppress(RuntimeError, MemoryError):
            while True:
                yield torch.empty(size, dtype=torch.uint8)


class Limit(OfRank):
    """Set a limit (memory or open files) of one rank to its current use before a step, in the first attempt only."""

    def __init__(self, rank: int, what: str, step: int = 2) -> None:
        super().__init__(rank, step)
        self.what = what

    def setup(self, run: RunContext) -> None:
        super().setup(run)
        self.here = self.here and not run.attempt.number

    def act(self) -> None:
        import resource

        if self.what == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
            self.held = list(_fill_memory())
        else:
            os.close(next_handle := os.dup(0))  # the lowest free one
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_handle, next_handle))
