"""Setting up memory and pipes between the processes of one host, for `shared_memory`."""

import contextlib
import fcntl
import json
import mmap
import os
import platform
import re
import select
import shutil
import struct
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch.distributed as dist

from threefold.torch_private.distributed import default_store, process_group_timeout

T = TypeVar("T")

SIGNAL_BYTES = 16
"""What a rank tells of each round."""
TURNSTILES = ("turnstile-0", "turnstile-1")
"""Names of the pipes that ranks pass in turn."""
_PIPE_BYTES: Final = 16 << 10
"""Of a pipe where the system does not tell, as macOS."""
_REFUSAL: Final = 1 << 32
"""What a vote against counts, beside the one that every vote counts."""


class Room(NamedTuple):
    """What a group needs, beside a pipe of each rank's that ends with it.

    Attributes:
        nbytes: of memory.
        pipes: names of the pipes that every rank may read and write, with what is in them at first.
        unread: bytes that each of these must take while nobody reads it.
    """

    nbytes: int
    pipes: Mapping[str, bytes]
    unread: int = 0


@dataclass(frozen=True)
class Shared:
    """The shared memory and pipes of a group, as one of its ranks has them.

    Attributes:
        ranks: their global ranks.
        index: this process's index among them.
        memory: as many bytes as the first rank has asked for.
        pipes: file descriptors of the pipes of its `Room`, in their order.
        alive: by peer index, the end for reading of a pipe that the peer alone can write to.
        own: the end for writing of this rank's, which others have in `alive`.
        timeout: seconds to wait for a peer at most.
    """

    ranks: list[int]
    index: int
    memory: mmap.mmap
    pipes: tuple[int, ...]
    alive: dict[int, int]
    own: int
    timeout: float

    @property
    def descriptors(self) -> list[int]:
        """Of all its pipes."""
        return [*self.pipes, *self.alive.values(), self.own]


def memory_bytes(size: int, capacity: int) -> int:
    """Bytes for rounds of `size` ranks: a signal of each, twice, and from the next page on slots of `capacity` bytes in
    whole pages, twice as many as there are ranks and two more."""
    return whole_pages(2 * size * SIGNAL_BYTES) + 2 * (size + 1) * whole_pages(capacity)


def room_for_rounds(size: int, capacity: int) -> Room:
    """What `size` ranks need for rounds: the two pipes that they pass in turn, with tickets in the first."""
    return Room(memory_bytes(size, capacity), dict(zip(TURNSTILES, (tickets(size), b""), strict=True)))


def whole_pages(length: int) -> int:
    """`length` bytes, rounded up to whole pages, one at least."""
    return -(-max(length, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def tickets(size: int) -> bytes:
    """What is in a turnstile that `size` ranks are to pass: a byte for each, of which the last is not zero."""
    return bytes(size - 1) + b"\1"


def share(groups: Sequence[dist.ProcessGroup], room: Callable[[int], Room | None]) -> list[Shared | None]:
    """Make memory and pipes between the ranks of each of `groups`; a collective call over each of them, with the same
    answer on every rank of a group.

    Args:
        groups: gloo process groups, whose store names are exchanged over; in one order on all ranks of two of them.
        room: what a group of so many ranks needs; None where this rank wants none.

    Returns None for a group whose ranks are not all on one host, or where the host has no room for the memory or a rank
    wants none.
    """
    with contextlib.ExitStack() as stack:
        sharings = [stack.enter_context(contextlib.closing(_Sharing(group, room))) for group in groups]
        # Of all groups at once: in each of these, a rank waits at most for what others do in the one before.
        for phase in (_Sharing.offer, _Sharing.open, _Sharing.open_own):
            for sharing in sharings:
                phase(sharing)
        return [sharing.result() for sharing in sharings]


class _Sharing:
    """The set-up of one group, in phases."""

    def __init__(self, group: dist.ProcessGroup, room: Callable[[int], Room | None]) -> None:
        self._exchange = StoreExchange(group)
        self._ranks, self._index = self._exchange.ranks, self._exchange.index
        self._room = room(len(self._ranks))
        self._peers = [peer for peer in range(len(self._ranks)) if peer != self._index]
        self._folder: Path | None = None
        self._at: int | None = None
        self._begun: tuple[mmap.mmap, tuple[int, ...], dict[int, int]] | None = None
        self._own: int | None = None
        self._opened = contextlib.ExitStack()  # closes the pipes again unless every rank gets to the end

    def offer(self) -> None:
        """The first rank makes the memory and the pipes."""
        if self._index == 0:
            self._folder = self._room and _make_folder(self._room, len(self._ranks))
            self._exchange.tell("folder", json.dumps([_host(), str(self._folder or "")]))

    def open(self) -> None:
        host, place = json.loads(self._exchange.told("folder"))
        if self._room and place and host == [*_host()]:
            self._at = _open_private(place)
        mine = partial(self._map_and_open, self._room) if self._room and self._at is not None else _nothing
        self._begun = self._voted("opened", mine)

    def open_own(self) -> None:
        """Open what a rank alone has open for writing, which needs a reader: all are there when all have opened."""
        mode = os.O_WRONLY if self._peers else os.O_RDWR
        opens = self._exchange.agreed("opened")
        self._own = self._voted("own", partial(self._pipe, _alive(self._index), mode) if opens else _nothing)

    def result(self) -> Shared | None:
        if not self._exchange.agreed("own") or self._begun is None or self._own is None:
            return None
        self._opened.pop_all()
        # What the group's own collectives wait at most.
        return Shared(self._ranks, self._index, *self._begun, self._own, self._exchange.timeout)

    def close(self) -> None:
        self._opened.close()
        if self._at is not None:
            os.close(self._at)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # what is open stays; nothing is left if we are killed now

    def _map_and_open(self, room: Room) -> tuple[mmap.mmap, tuple[int, ...], dict[int, int]]:
        pipes = tuple(self._pipe(name, os.O_RDWR) for name in room.pipes)
        if room.unread > min(map(_pipe_bytes, pipes)):
            raise OSError("a pipe is too short")
        if self._index == 0:
            for pipe, content in zip(pipes, room.pipes.values(), strict=True):
                os.write(pipe, content)
        readers = {peer: self._pipe(_alive(peer), os.O_RDONLY) for peer in self._peers}
        return self._map_memory(), pipes, readers

    def _map_memory(self) -> mmap.mmap:
        with open(os.open("memory", os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._at), "r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    def _pipe(self, name: str, mode: int) -> int:
        flags = mode | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(name, flags, dir_fd=self._at)  # opening must not wait for the other end
        self._opened.callback(os.close, descriptor)
        return descriptor

    def _voted(self, step: str, action: Callable[[], T | None]) -> T | None:
        """Vote for a step if `action` does not fail; returns its result."""
        try:
            result = action()
        except OSError:
            result = None
        self._exchange.vote(step, result is not None)
        return result


def _pipe_bytes(pipe: int) -> int:
    """What a pipe takes: 64 KiB as a rule on Linux, and a page or two where its user has very many."""
    ask = getattr(fcntl, "F_GETPIPE_SZ", None)
    return int(fcntl.fcntl(pipe, ask)) if ask is not None else _PIPE_BYTES


def _nothing() -> None:
    """In place of a step that another one has made impossible."""


def _alive(index: int) -> str:
    return f"alive-{index}"


def _host() -> tuple[str, str]:
    """An identifier of this host, also where hosts share a file system or a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""


def _make_folder(room: Room, size: int) -> Path | None:
    """A new folder with the memory and pipes of `size` ranks, in memory where possible; None if there is no room."""
    for parent in ("/dev/shm", tempfile.gettempdir()):
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="threefold-", dir=parent))
            with open(folder / "memory", "wb") as file:
                _reserve(file.fileno(), room.nbytes)
            for name in (*room.pipes, *map(_alive, range(size))):
                os.mkfifo(folder / name)
            return folder
        except OSError:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
    return None


def _open_private(folder: str) -> int | None:
    """A descriptor of a folder that nobody but this user can have made or changed; None where it is another.

    Its name comes over a store that other users of the host can reach, and what is in it is unpickled.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    return None


def _reserve(descriptor: int, length: int) -> None:
    """Give the file `length` bytes that are really there: touching a page too many would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)
    else:
        os.write(descriptor, bytes(length))


class StoreExchange:
    """Messages and votes of the ranks of a process group, over its store, while they set something up.

    A gather over the process group takes a message from each rank to each; these take some requests to the store a
    rank. Telling and voting do not wait for other ranks, so that a rank can set several groups up at once.

    Every rank of the group makes one, and as many as the others.

    Args:
        group: a CPU process group; ranks wait as long as its collectives do.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self.index = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.timeout = process_group_timeout(group)
        store = default_store()
        place = f"threefold/exchange/{group.group_name}"
        count = store.add(
            f"{place}/{self.index}", 1
        )  # the same on every rank, so that no message of an earlier one is read
        self._store = dist.PrefixStore(f"{place}/{count}th", store)

    def tell(self, name: str, text: str) -> None:
        """Tell every rank something under a name; one rank of the group does."""
        self._store.set(name, text)

    def told(self, name: str) -> str:
        """What a rank tells under this name; waits for it."""
        self._store.wait([name], timedelta(seconds=self.timeout))
        return str(self._store.get(name).decode())

    def vote(self, name: str, yes: bool) -> None:
        """Vote on what has this name; every rank of the group does once."""
        count = self._store.add(f"{name}/votes", 1 if yes else 1 + _REFUSAL)
        if count % _REFUSAL == len(self.ranks):
            self._store.set(name, str(int(count < _REFUSAL)))

    def agreed(self, name: str) -> bool:
        """Whether all ranks have voted for it; waits until they have voted."""
        return self.told(name) == "1"


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
