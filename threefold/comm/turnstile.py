"""A turnstile for the processes of one host: each round lets nobody pass before all have come, without spinning.

Two pipes serve in turn, with a ticket of one byte for each rank. A rank that comes takes a ticket. The
one that gets the last puts the tickets of the next round into the other pipe, which wakes all the others at once:
these sleep until there is something in it, which is the case until all have come to the next round. A round of n ranks
takes 2n system calls, and wakes each rank once.

Processes that share a core must not spin. Pipes order the accesses to memory around them: who gets the last ticket has
taken the lock of a pipe after all the others, and these return from a system call that has seen what that one wrote
later. (A sleeper's reads after it depend on a return from the kernel, which no processor reads ahead of.) And they end
with their processes: each rank holds the only end for writing of one more pipe, whose closing wakes those that sleep.
"""

import os
import re
import select
import struct
import weakref
from collections.abc import Mapping

from threefold.comm.shared_memory_setup import SIGNAL_BYTES, Shared, tickets

_SIGNAL = struct.Struct("<QBBHI")  # number of the round, operation, dtype, source index, elements in this round
assert _SIGNAL.size == SIGNAL_BYTES
_FIRST = 2  # even, for the turnstile that has tickets from the beginning, and not what the memory is filled with


class PeerLostError(ConnectionError):
    """A process of the group has ended while this one was waiting for it; the message begins with its rank."""

    @property
    def rank(self) -> int | None:
        """The rank that has ended; None where the message does not begin with it."""
        found = re.match(r"rank (\d+) ended", str(self))
        return int(found[1]) if found else None


class Turnstile:
    """What a group of processes meets at, round by round.

    Args:
        shared: the group's memory and pipes.
        operations, dtypes: how what a rank does in a round is called in messages, by its code.

    Attributes:
        parity: 0 or 1, of the next round.
    """

    def __init__(self, shared: Shared, operations: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
        self._ranks, self._index, self._timeout = shared.ranks, shared.index, shared.timeout
        self._operations, self._dtypes = operations, dtypes
        self._number = _FIRST
        size = len(shared.ranks)
        signals = memoryview(shared.memory)[: 2 * size * SIGNAL_BYTES]
        self._signals = (signals[: size * SIGNAL_BYTES], signals[size * SIGNAL_BYTES :])
        self._tickets, self._pipes, self._alive = tickets(size), shared.pipes, shared.alive
        self._pollers = tuple(poller(turnstile, shared.alive) for turnstile in shared.pipes)
        self._closed = weakref.finalize(self, close_all, shared.descriptors)

    @property
    def parity(self) -> int:
        return self._number & 1

    def close(self) -> None:
        """Close the pipes. Peers that wait for this rank then raise `PeerLostError`."""
        self._closed()
        for signals in self._signals:
            signals.release()

    def meet(self, operation: int, dtype: int, count: int, source: int = 0) -> None:
        """Return when every rank has called it, for the same operation; what they wrote to memory before is there.

        Raises:
            PeerLostError: another rank has ended.
            TimeoutError: another rank has not come.
            RuntimeError: another rank has come for something else.
        """
        parity, number = self._number & 1, self._number
        signal = _SIGNAL.pack(number, operation, dtype, source, count)
        self._number += 1
        signals, start = self._signals[parity], self._index * SIGNAL_BYTES
        signals[start : start + SIGNAL_BYTES] = signal
        try:
            ticket = os.read(self._pipes[parity], 1)
        except BlockingIOError:
            raise RuntimeError(f"{self._me} goes on after a round in which it has failed") from None
        if ticket == b"\0":
            self._sleep(1 - parity, number, self._operations[operation])
        else:
            os.write(self._pipes[1 - parity], self._tickets)
        found = bytes(signals)
        if found != signal * len(self._ranks):
            self._raise_difference(found, signal)

    def _sleep(self, exit: int, number: int, operation: str) -> None:
        """Wait until there is something in the turnstile `exit`."""
        turnstile = self._pipes[exit]
        events = dict(self._pollers[exit].poll(self._timeout * 1000))
        if turnstile in events:
            return
        if not events:
            missing = self._ranks[self._missing(number)]
            raise TimeoutError(f"{self._me} has waited {self._timeout:g} s in {operation} for rank {missing}")
        # Who has passed may end; what it has passed is seen after its end, if not before.
        if not poller(turnstile, {}).poll(0):
            lost = next(peer for peer, descriptor in self._alive.items() if descriptor in events)
            raise PeerLostError(f"rank {self._ranks[lost]} ended while {self._me} was in {operation}")

    def _missing(self, number: int) -> int:
        """The first index that has not come to a round; the last one's where all have, just now."""
        signals = _SIGNAL.iter_unpack(self._signals[number & 1])
        come = [at == number for at, *_ in signals]
        return come.index(False) if False in come else len(come) - 1

    def _raise_difference(self, found: bytes, mine: bytes) -> None:
        starts = range(0, len(found), SIGNAL_BYTES)
        signals = [found[start : start + SIGNAL_BYTES] for start in starts]
        peer = next(peer for peer, signal in enumerate(signals) if signal != mine)
        raise RuntimeError(
            f"{self._me} called {self._describe(mine)} "
            f"while rank {self._ranks[peer]} called {self._describe(signals[peer])}"
        )

    @property
    def _me(self) -> str:
        return f"rank {self._ranks[self._index]}"

    def _describe(self, signal: bytes) -> str:
        _, operation, dtype, source, count = _SIGNAL.unpack(signal)
        name = self._operations[operation]
        origin = f" from index {source}" if name == "broadcast_" else ""
        return f"{name} of {count} elements of {self._dtypes[dtype]}{origin}"


def poller(pipe: int, alive: Mapping[int, int]) -> select.poll:
    """Sleeps until there is something in a pipe, or one of the ranks of `alive` has ended."""
    made = select.poll()
    for descriptor in alive.values():
        made.register(descriptor, 0)  # hang-ups are told without being asked for
    made.register(pipe, select.POLLIN)
    return made


def close_all(descriptors: list[int]) -> None:
    """Close file descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
