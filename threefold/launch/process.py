"""Processes of a run: forking, ending with the parent, and stop signals."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

from threefold.errors import UserError


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that forked it ends (Linux only).

    `parent` is the process id of the parent, read before forking, as it may have ended since.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import within the block without garbage collection, and exempt the imported objects from later collections.

    Otherwise the collector runs over and over while torch is imported, a fifth of the import time, and finds nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def shared_objects() -> Iterator[None]:
    """Fork within the block while existing objects are exempt from garbage collection, here and in the forks.

    A collection writes to every object that it visits. The first one in a fork would copy every page of the parent's
    imports: 17,000 pages and 0.2 s per rank, in its first step.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def group_error() -> UserError:
    """Return the error for a process that cannot start ranks because it is a rank already."""
    return UserError(
        "torch.distributed is initialised in this process, so it cannot start ranks of its own; call init_mesh in "
        "the function that runs on each rank."
    )


def prepare_fork() -> bool:
    """Prepare this process so that its forks can run torch operations, and return whether they may do so in parallel.

    Where some threads of this process could not be ended, forks must compute with one thread each.
    """
    import torch
    import torch.distributed as dist

    from threefold.torch_private.runtime import end_openmp_threads

    if dist.is_initialized():
        raise group_error()
    if torch.cuda.is_initialized():
        raise UserError(
            "CUDA is initialised in this process, so its forks could not use it; start the ranks before anything uses "
            "a GPU (in a notebook, restart the kernel), or with start_method='spawn'."
        )
    return end_openmp_threads()


NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ONE_PRESS: Final = 1.0
"""Seconds within which signals count as one: Ctrl-C reaches a rank from the terminal and through its launcher."""


class StopRequested(KeyboardInterrupt):
    """A signal came outside the steps of a run, or (`again`) a second signal, so that no checkpoint was saved."""

    def __init__(self, number: int, again: bool = False) -> None:
        super().__init__(signal_name(number))
        self.number, self.again = number, again


def raise_on_second(number: int, again: bool) -> None:
    """Let the first signal pass, as ranks get it too; raise `StopRequested` on a second one."""
    if again:
        raise StopRequested(number, again)


class StopSignals:
    """Handle the signals `NUMBERS` of this process within the block; do nothing outside the main thread.

    Outside `passed_to` and `noted`, a signal raises `StopRequested`. `received` is the number of the first, 0 before.
    If the process ends after a signal (`process_ends`), later ones are ignored on exit; otherwise the previous handlers
    are restored.
    """

    def __init__(self, process_ends: bool = True) -> None:
        self.received, self._when, self._process_ends, self._pid = 0, 0.0, process_ends, os.getpid()
        self._before: dict[int, Any] = {}
        self._take: Callable[[int, bool], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # An ignored signal, as in a background job of a shell, stays ignored.
            taken = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            # If the process is ending, another signal must not change its exit status.
            signal.signal(number, signal.SIG_IGN if self.received and self._process_ends else before)

    @contextmanager
    def passed_to(self, take: Callable[[int, bool], None]) -> Iterator[None]:
        """Call `take(number, again)` for each signal within the block instead of raising.

        A signal that came before the block is passed to `take` on entry. The previous callback is restored on exit.
        """
        before, self._take = self._take, take
        try:
            if self.received:
                take(self.received, False)
            yield
        finally:
            self._take = before

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Store the first signal in `received` and end the process at once on a second one.

        A thread waits for the second, as the main thread may be in a call that never returns to Python.
        """
        if not self._before:
            yield
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        when = time.monotonic() if self.received else None

        def end_on_second() -> None:
            nonlocal when
            with open(read, "rb", buffering=0) as numbers:
                while number := numbers.read(1):
                    if number[0] in NUMBERS:
                        now = time.monotonic()
                        if when is not None and now - when >= ONE_PRESS:
                            os._exit(128 + number[0])
                        when = when or now

        threading.Thread(target=end_on_second, daemon=True).start()
        try:
            with self.passed_to(lambda number, again: None):
                yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked helper process ends as it would without a handler
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


def note_signals() -> Callable[[], int]:
    """Note stop signals in a rank of a local run; return a function that returns the signal's number, 0 before.

    The parent handles Ctrl-C and sends SIGTERM to the ranks; Slurm sends SIGUSR1 to all processes of a job step.
    """
    noted = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        noted = number

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    return lambda: noted


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals, so that a process forked here gets none before it has set its own handlers and unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
