"""SIGINT and SIGTERM to a training run: the first ends it in order, a second one at once."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

from threefold.launch.process import signal_name

NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)
ONE_PRESS: Final = 1.0
"""Seconds within which signals are one: Ctrl-C reaches a rank from the terminal and through its launcher too."""


class StopRequested(KeyboardInterrupt):
    """A signal came where there is nothing to finish first.

    Attributes:
        number: of the signal.
        again: whether it was a second one, so that what was to be finished was not.
    """

    def __init__(self, number: int, again: bool = False) -> None:
        super().__init__(signal_name(number))
        self.number, self.again = number, again


class StopSignals:
    """Takes SIGINT and SIGTERM of this process while it is entered; in the main thread, else it does nothing.

    Until somebody takes them over (`passed_to`, `noted`), a signal raises `StopRequested` where the process is. Once
    one came, more are ignored after this is left, as the process ends then.

    Attributes:
        received: the number of the first signal, 0 before.
    """

    def __init__(self) -> None:
        self.received = 0
        self._when = 0.0
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self._take: Callable[[int, bool], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # One that is ignored, as that of a shell's background job may be, stays so.
            taken = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            # After a signal the process only ends: one more is not to change the status that says in which way.
            signal.signal(number, signal.SIG_IGN if self.received else before)

    @contextmanager
    def passed_to(self, take: Callable[[int, bool], None]) -> Iterator[None]:
        """Call `take(number, again)` for each signal instead of raising; for the one that came already, first."""
        self._take = take
        try:
            if self.received:
                take(self.received, False)
            yield
        finally:
            self._take = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Have the first signal in `received`, and end the process at once on a second one.

        Also while it is in a call that never returns to Python, so a thread waits for the second.
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
        if os.getpid() != self._pid:  # a forked helper, which is to end as if there were no handler
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
    """Whether a rank of a local run was asked to end: SIGTERM by its parent, or by whoever signals all processes.

    Ctrl-C is the parent's to hear. Called, it gives the number of the signal, 0 before.
    """

    def __init__(self) -> None:
        self._number = 0
        signal.signal(signal.SIGTERM, self._handle)

    def __call__(self) -> int:
        return self._number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._number = number


@contextmanager
def held_back() -> Iterator[None]:
    """Have signals wait, so that a process forked here gets none before it has handlers of its own (`let_in`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_in() -> None:
    """Take the signals that `held_back` had wait in the process that forked this one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def _end_on_second(pipe: int, first: int) -> None:
    """End the process on a signal that comes later than `ONE_PRESS` after the first; until the pipe is closed."""
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
