"""The rendezvous of ranks that a launcher started: they come to the store of rank 0, or to that of the launcher.

Waiting is in slices, so that signals work, and ends: torch waits in native code, where Ctrl-C does nothing.
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from threefold.errors import UserError
from threefold.launch.environment import LaunchedRank
from threefold.launch.hang_watch import PATIENCE

if TYPE_CHECKING:
    from torch.distributed import Store

LONGEST_WAIT: Final = 1800.0
"""Seconds that ranks wait for each other where no setting says how long; as torch has it."""
NOTICE: Final = 5.0
"""Seconds of waiting after which a rank says what it waits for."""
_SLICE: Final = 0.2
"""Seconds between two looks."""
_RANKS_PER_SECOND: Final = 2000
"""How many may look at the store in a second."""
_PROBE: Final = 5.0
"""Seconds in which a host answers, or does not."""
_MOST_NAMED: Final = 4
"""Ranks that a message names one by one."""


def meet(launched: LaunchedRank, timeout: float = 0.0) -> "Store":
    """Come to the rendezvous, and wait until all ranks have; a launcher may keep the same store when it restarts them.

    Args:
        launched: this rank.
        timeout: seconds in which a rank is to make progress, `train.timeout`; it has `PATIENCE` times as long to come
            here, and 0 is for `LONGEST_WAIT`.

    Returns:
        the store of this attempt.

    Raises:
        UserError: the others have not come in time, or this rank cannot get there.
    """
    import torch.distributed as dist

    wait = _Wait(launched, timeout)
    found: Any = _come(wait)
    found.set_timeout(timedelta(seconds=LONGEST_WAIT))
    store = dist.PrefixStore(f"threefold/{launched.attempt}", found)
    _wait_for_others(wait, store)
    return store


class _Wait:
    """How long a rank has waited, and for whom.

    Args:
        launched: this rank.
        timeout: as of `meet`.

    Attributes:
        console: the descriptor of standard error.
    """

    console = 2

    def __init__(self, launched: LaunchedRank, timeout: float) -> None:
        self.launched, self._timeout = launched, timeout
        self._limit = PATIENCE * timeout or LONGEST_WAIT
        self._begun, self._told = time.monotonic(), False

    def look(self, whom: Callable[[], str], seconds: float = _SLICE) -> None:
        """Wait for a slice; say once what for, on standard error.

        Args:
            whom: says for which ranks.

        Raises:
            UserError: it has been long enough.
        """
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

    A thread does, as native code waits for an answer of whatever listens there, without an end.
    """
    launched = wait.launched
    made: list[Any] = []
    hosts = launched.rank == 0 and not launched.hosted
    over = threading.Event()

    def make() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
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
            wait.look(lambda: f"nothing there answers{_because(failure)}", _SLICE / 4)
    finally:
        over.set()
        if wait.console != 2:  # the thread may still hold back what is written there
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
            wait_for_workers=False,  # which it does in native code
            multi_tenant=True,
        )


def _wait_for_others(wait: _Wait, store: "Store") -> None:
    """Return when all ranks have come to the store."""
    rank, size = wait.launched.rank, wait.launched.world_size
    if size == 1:
        return

    def absent() -> str:
        with held_back_errors():
            return _have_not_come([each for each in range(size) if not store.check([f"come/{each}"])])

    pause, longest = 0.005, max(_SLICE, size / _RANKS_PER_SECOND)
    try:
        with held_back_errors():
            store.set(f"come/{rank}", "")
            number = store.add("come", 1)
            everyone = f"come/all/{(number - 1) // size}"  # a store of the launcher may have been met at before
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


def _have_not_come(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has not come"
    shown = ranks if len(ranks) <= _MOST_NAMED else ranks[: _MOST_NAMED - 1]
    *most, last = [*map(str, shown), *([f"{len(ranks) - len(shown):,} more"] if len(shown) < len(ranks) else [])]
    return f"ranks {', '.join(most)} and {last} have not come"


def _because(failure: Sequence[Exception]) -> str:
    return f" ({_reason(failure[0])})" if failure else ""


def _reason(error: Exception) -> str:
    """What the system says of an error, without the frames of native code."""
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error).partition("\n")[0].rpartition("message: ")[2].rstrip(".")


@contextmanager
def held_back_errors() -> Iterator[None]:
    """Keep what native code writes to standard error in the block: it is shown after it, but not where the block
    raises, as torch writes frames of C++ before it raises the same."""
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
