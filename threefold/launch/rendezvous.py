"""Rendezvous of ranks that a launcher started: they meet at the store of rank 0, or at the launcher's.

torch waits in native code, where Ctrl-C does nothing; here waiting is in slices, so that signals work, and it has a
limit.
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from threefold.errors import UserError
from threefold.launch.environment import LaunchedRank
from threefold.launch.hang_watch import PATIENCE, named_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

LONGEST_WAIT: Final = 1800.0
"""Seconds that ranks wait for each other if no setting says how long; torch's default."""
NOTICE: Final = 5.0
"""Seconds of waiting after which a rank prints what it waits for."""
_SLICE: Final = 0.2  # seconds between two checks
_RANKS_PER_SECOND: Final = 2000  # checks of the store per second, by all ranks together
_PROBE: Final = 5.0  # seconds within which a host must answer


def meet(launched: LaunchedRank, timeout: float = 0.0) -> "Store":
    """Connect to the rendezvous and wait until all ranks have; a launcher may keep its store when it restarts them.

    Args:
        launched: this rank.
        timeout: seconds within which a rank must make progress (`train.timeout`); ranks have `PATIENCE` times as long
            to arrive. 0 for `LONGEST_WAIT`.

    Returns:
        the store of this attempt.

    Raises:
        UserError: the other ranks have not arrived in time, or this rank cannot connect.
    """
    import torch.distributed as dist

    wait = _Wait(launched, timeout)
    found: Any = _come(wait)
    found.set_timeout(timedelta(seconds=LONGEST_WAIT))
    store = dist.PrefixStore(f"threefold/{launched.attempt}", found)
    _wait_for_others(wait, store)
    return store


class _Wait:
    """Waiting time of a rank, with a notice on `console` (a descriptor of standard error) and a limit."""

    console = 2

    def __init__(self, launched: LaunchedRank, timeout: float) -> None:
        self.launched, self._timeout = launched, timeout
        self._limit = PATIENCE * timeout or LONGEST_WAIT
        self._begun, self._told = time.monotonic(), False

    def look(self, whom: Callable[[], str], seconds: float = _SLICE) -> None:
        """Wait for a slice; after `NOTICE` seconds print once for `whom`, and at the limit raise `UserError`."""
        waited = time.monotonic() - self._begun
        if waited >= self._limit:
            why = f"{PATIENCE} times train.timeout" if self._timeout else "the limit"
            raise self.error(f"{whom()} within {self._limit:g} s ({why})")
        if waited >= NOTICE and not self._told:
            self._told = True
            with suppress(OSError):
                os.write(self.console, f"Waiting: {self._sentence(f'{whom()} yet')}.\n".encode())
        time.sleep(min(seconds, max(self._limit - waited, 0.01)))

    def error(self, what: str) -> UserError:
        return UserError(self._sentence(what))

    def _sentence(self, what: str) -> str:
        return (
            f"rank {self.launched.rank} of {self.launched.world_size:,} is at its rendezvous {_address(self.launched)} "
            f"but {what}; {self.launched.variables}: start all ranks, or this one alone without these variables"
        )


def _address(launched: LaunchedRank) -> str:
    host = f"[{launched.host}]" if ":" in launched.host else launched.host
    return f"{host}:{launched.port}"


def _come(wait: _Wait) -> "Store":
    """Start the store on the rank that hosts it; connect to it on the others.

    A thread does it, as native code may wait forever for an answer.
    """
    launched = wait.launched
    made: list[Any] = []
    hosts = launched.rank == 0 and not launched.hosted
    over = threading.Event()

    def make() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
        while not over.is_set():
            try:
                if not hosts:
                    socket.create_connection((launched.host, launched.port), _PROBE).close()
                made.append(_store(launched, hosts))
                return
            except Exception as error:
                failure[:] = [error]
                if hosts:
                    return
            over.wait(_SLICE)

    failure: list[Exception] = []
    thread = threading.Thread(target=make, name="rendezvous", daemon=True)
    with suppress(OSError):
        wait.console = os.dup(2)
    thread.start()
    try:
        thread.join(_SLICE / 4)
        while not made:
            if not thread.is_alive() and failure and not made:
                raise wait.error(f"cannot listen there ({_reason(failure[0])})")
            wait.look(lambda: "nothing there answers" + (f" ({_reason(failure[0])})" if failure else ""), _SLICE / 4)
    finally:
        over.set()
        if wait.console != 2:  # the thread may still hold back output
            os.dup2(wait.console, 2)
            os.close(wait.console)
            wait.console = 2
    return made[0]


def _store(launched: LaunchedRank, hosts: bool) -> "Store":
    import torch.distributed as dist

    with held_back_errors():
        return dist.TCPStore(
            launched.host,
            launched.port,
            launched.world_size,
            hosts,
            timedelta(seconds=_PROBE),
            wait_for_workers=False,  # torch would wait in native code
            multi_tenant=True,
        )


def _wait_for_others(wait: _Wait, store: "Store") -> None:
    """Return when all ranks have reached the store."""
    rank, size = wait.launched.rank, wait.launched.world_size
    if size == 1:
        return

    def absent() -> str:
        with held_back_errors():
            ranks = [each for each in range(size) if not store.check([f"come/{each}"])]
        return f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not come"

    pause, longest = 0.005, max(_SLICE, size / _RANKS_PER_SECOND)
    try:
        with held_back_errors():
            store.set(f"come/{rank}", "")
            number = store.add("come", 1)
            everyone = f"come/all/{(number - 1) // size}"  # a launcher's store may have been used before
            if number % size == 0:
                store.set(everyone, "")
        while True:
            with held_back_errors():
                if store.check([everyone]):
                    return
            wait.look(absent, pause)
            pause = min(2 * pause, longest)
    except RuntimeError as error:  # the process that listens there has ended
        raise wait.error(f"the connection to it is lost ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """Return the system's reason for an error, without frames of native code."""
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error).partition("\n")[0].rpartition("message: ")[2].rstrip(".")


@contextmanager
def held_back_errors() -> Iterator[None]:
    """Hold back what native code writes to standard error in the block; show it afterwards unless the block raises.

    torch writes C++ frames before it raises the same error.
    """
    try:
        sys.stderr.flush()
        before = os.dup(2)
    except (OSError, ValueError, AttributeError):  # closed
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        with suppress(OSError):
            os.write(2, file.read())
