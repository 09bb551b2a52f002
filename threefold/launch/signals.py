"""Signals that end a training run: the first stops it after a checkpoint, a second one at once.

They are SIGINT (Ctrl-C), SIGTERM, and SIGUSR1, which `sbatch --signal=USR1@120` sends two minutes before a Slurm job's
time is up.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

from threefold.launch.process import signal_name

NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ONE_PRESS: Final = 1.0
"""Seconds within which signals count as one: Ctrl-C reaches a rank from the terminal and through its launcher."""


class StopRequested(KeyboardInterrupt):
    """A signal came outside the steps of a run, or a second one.

    Attributes:
        number: of the signal.
        again: whether it was a second one, so that no checkpoint was saved.
    """

    def __init__(self, number: int, again: bool = False) -> None:
        super().__init__(signal_name(number))
        self.number, self.again = number, again


class StopSignals:
    """Context manager that handles the signals `NUMBERS` of this process; does nothing outside the main thread.

    Outside of `passed_to` and `noted` a signal raises `StopRequested`.

    Args:
        process_ends: whether the process is ending after a signal, so that on exit later ones are ignored; otherwise
            the handlers of before are put back.

    Attributes:
        received: the number of the first signal, 0 before.
    """

    def __init__(self, process_ends: bool = True) -> None:
        self.received = 0
        self._process_ends = process_ends
        self._when = 0.0
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self._take: Callable[[int, bool], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # A signal that is ignored, as in a background job of a shell, stays ignored.
            taken = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            # Where the process is ending, another signal must not change its exit status.
            signal.signal(number, signal.SIG_IGN if self.received and self._process_ends else before)

    @contextmanager
    def passed_to(self, take: Callable[[int, bool], None]) -> Iterator[None]:
        """Call `take(number, again)` for each signal instead of raising, first for one that came already; after it what
        was called before it."""
        before, self._take = self._take, take
        try:
            if self.received:
                take(self.received, False)
            yield
        finally:
            self._take = before

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Store the first signal in `received`, and end the process at once on a second one.

        A thread waits for the second, as the main thread may be in a call that never returns to Python.
        """
        if not self._before:
            yield
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=_end_on_second, args=(read, self.received), daemon=True).start()
        try:
            with self.passed_to(lambda number, again: None):
                yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked helper process, which ends as without a handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now, again = time.monotonic(), bool(self.received)
        if again and now - self._when < ONE_PRESS:
            return
        if not again:
            self.received, self._when = number, now
        if self._take is None:
            raise StopRequested(number, again)
        self._take(number, again)


class Asked:
    """Handler of a rank of a local run; calling it returns the number of the signal, 0 before.

    The parent handles Ctrl-C and sends SIGTERM to the ranks; Slurm sends SIGUSR1 to all processes of a job step.
    """

    def __init__(self) -> None:
        self._number = 0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def __call__(self) -> int:
        return self._number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = number


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals, so that a process forked here gets none before it has its own handlers (`unblock_signals`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """Unblock the signals that `signals_blocked` blocked in the process that forked this one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def _end_on_second(pipe: int, first: int) -> None:
    """End the process on a signal more than `ONE_PRESS` seconds after the first; returns when the pipe is closed."""
    when = time.monotonic() if first else None
    with open(pipe, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] not in NUMBERS:
                continue
            now = time.monotonic()
            if when is None:
                when = now
            elif now - when >= ONE_PRESS:
                os._exit(128 + number[0])
