"""A thread beside training, for saves and copies."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress


class WorkThread:
    """A daemon thread of low priority that runs one piece of work after another.

    Threads of `concurrent.futures` are joined when the interpreter exits, which would hang on a thread that waits for a
    lost rank.
    """

    def __init__(self, name: str) -> None:
        self._name, self._left, self._idle = name, 0, threading.Condition()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Queue `work`, which must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        with self._idle:
            self._left += 1
        self._work.put(work)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all work is done, at most `seconds`, and return whether it is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._left, seconds)

    def end(self) -> None:
        """Let the thread end after its queued work, without waiting for it."""
        if self._thread is not None:
            self._work.put(None)
            self._thread = None

    def _run(self) -> None:
        if sys.platform == "linux":  # where threads have priorities of their own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # training goes first
        while (work := self._work.get()) is not None:
            try:
                work()
            finally:
                with self._idle:
                    self._left -= 1
                    self._idle.notify_all()
