"""Set-up of shared memory and pipes between the processes of one host, and the rounds in which they meet."""

import contextlib
import fcntl
import json
import mmap
import os
import select
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

import torch.distributed as dist

from threefold.cpu.scratch import host_name, scratch_folder
from threefold.torch_private.distributed import default_store, process_group_timeout

SIGNAL_BYTES = 16
"""Bytes that a rank writes to announce a round."""
BARRIER_PIPES = ("barrier-0", "barrier-1")
"""Names of the pipes that ranks pass in turn."""
_PIPE_BYTES: Final = 16 << 10
"""Capacity of a pipe on systems that do not report it, such as macOS."""
_MEMORY: Final = "memory"
"""File of the memory in the folder of a group that is being set up."""
_REFUSAL: Final = 1 << 32
"""Weight of a "no" vote, added to the 1 that every vote counts."""


class Room(NamedTuple):
    """Memory and pipes that a group needs, besides each rank's pipe that shows it is alive."""

    nbytes: int
    pipes: Mapping[str, bytes]  # that every rank may read and write: name → initial content
    unread: int = 0  # bytes that each of these pipes must hold while nobody reads it


@dataclass(frozen=True)
class Shared:
    """Shared memory and pipes of a group, as one of its ranks has opened them; a pipe is a file descriptor."""

    ranks: list[int]
    index: int
    memory: mmap.mmap  # of the size that the first rank asked for
    pipes: tuple[int, ...]  # those of the group's `Room`, in their order
    alive: dict[int, int]  # by peer index, read end of a pipe that only the peer can write to
    local: int  # write end of this rank's pipe, whose read end others have in `alive`
    timeout: float  # longest wait for a peer, in seconds

    @property
    def descriptors(self) -> list[int]:
        """File descriptors of all pipes."""
        return [*self.pipes, *self.alive.values(), self.local]


def memory_bytes(size: int, capacity: int) -> int:
    """Return the bytes for rounds: two signals per rank, then 2 · (`size` + 1) slots of `capacity` in whole pages."""
    return whole_pages(2 * size * SIGNAL_BYTES) + 2 * (size + 1) * whole_pages(capacity)


def room_for_rounds(size: int, capacity: int) -> Room:
    """Return the room that `size` ranks need for rounds: memory, and two pipes with the tickets in the first."""
    return Room(memory_bytes(size, capacity), dict(zip(BARRIER_PIPES, (tickets(size), b""), strict=True)))


def whole_pages(length: int) -> int:
    """Round `length` bytes up to whole pages, at least one."""
    return -(-max(length, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def tickets(size: int) -> bytes:
    """Return the content of a barrier's pipe for `size` ranks: one byte for each, and only the last one nonzero."""
    return bytes(size - 1) + b"\1"


def share(groups: Sequence[dist.ProcessGroup], room: Callable[[int], Room | None]) -> list[Shared | None]:
    """Create memory and pipes between the ranks of each group; None for a group that cannot have them.

    Collective over each group, with the same answer on all of its ranks. The answer is None if the ranks are not all on
    one host, the host has no room for the memory, or a rank's `room` of the group's size is None. The store of the gloo
    groups exchanges the names; two ranks pass the groups that they share in one order.
    """
    with contextlib.ExitStack() as stack:
        sharings = [stack.enter_context(contextlib.closing(_sharing(group, room))) for group in groups]
        # All groups go through a phase together, so a rank waits at most for what others did in the phase before.
        phases = [[next(sharing) for sharing in sharings] for _ in range(4)]
        return phases[-1]


def _sharing(group: dist.ProcessGroup, room: Callable[[int], Room | None]) -> Generator[Shared | None]:
    """Set up one group in four phases; yield after each, the result after the last."""
    exchange = StoreExchange(group)
    ranks, index = exchange.ranks, exchange.index
    wanted, peers = room(len(ranks)), [peer for peer in range(len(ranks)) if peer != index]
    at: int | None = None

    def open_pipe(name: str, mode: int) -> int:
        descriptor = os.open(name, mode | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=at)  # do not wait for the other end
        opened.callback(os.close, descriptor)
        return descriptor

    def open_all(room: Room) -> tuple[mmap.mmap, tuple[int, ...], dict[int, int]]:
        pipes = tuple(open_pipe(name, os.O_RDWR) for name in room.pipes)
        # A pipe usually holds 64 KiB on Linux, and a page or two if its user has very many pipes.
        ask = getattr(fcntl, "F_GETPIPE_SZ", None)
        if room.unread > min(_PIPE_BYTES if ask is None else int(fcntl.fcntl(pipe, ask)) for pipe in pipes):
            raise OSError("a pipe is too short")
        if index == 0:
            for pipe, content in zip(pipes, room.pipes.values(), strict=True):
                os.write(pipe, content)
        readers = {peer: open_pipe(_alive(peer), os.O_RDONLY) for peer in peers}
        with open(os.open(_MEMORY, os.O_RDWR | os.O_NOFOLLOW, dir_fd=at), "r+b") as file:
            return mmap.mmap(file.fileno(), 0), pipes, readers

    # Of these, `opened` closes the pipes unless every rank reaches the end.
    with contextlib.ExitStack() as cleaning, contextlib.ExitStack() as opened:
        if index == 0:
            folder = wanted and _make_folder(wanted, len(ranks), cleaning)
            exchange.tell("folder", json.dumps([host_name(), str(folder or "")]))
        yield None
        host, place = json.loads(exchange.told("folder"))
        begun = local = None
        if wanted and place and host == [*host_name()]:
            at = _open_private(place)
        if wanted and at is not None:
            cleaning.callback(os.close, at)
            with contextlib.suppress(OSError):
                begun = open_all(wanted)
        exchange.vote("opened", begun is not None)
        yield None
        # Opening its own pipe for writing requires a reader: all exist once all ranks have opened theirs.
        if exchange.agreed("opened"):
            if index == 0 and at is not None:  # what is open stays, and nothing large is left if we are killed
                os.unlink(_MEMORY, dir_fd=at)
            with contextlib.suppress(OSError):
                local = open_pipe(_alive(index), os.O_WRONLY if peers else os.O_RDWR)
        exchange.vote("local", local is not None)
        yield None
        shared = None
        if exchange.agreed("local") and begun is not None and local is not None:
            opened.pop_all()
            # The timeout is that of the group's own collectives.
            shared = Shared(ranks, index, *begun, local, exchange.timeout)
        yield shared


def _alive(index: int) -> str:
    return f"alive-{index}"


def _make_folder(room: Room, size: int, cleaning: contextlib.ExitStack) -> Path | None:
    """Create a folder with the memory and pipes of `size` ranks, in memory if possible; None if there is no room.

    `cleaning` deletes it. If this process is killed before, the next one that makes such a folder does.
    """
    for parent in ("/dev/shm", tempfile.gettempdir()):
        with contextlib.suppress(OSError), contextlib.ExitStack() as made:
            folder = made.enter_context(scratch_folder(parent))
            with open(folder / _MEMORY, "wb") as file:
                _reserve(file.fileno(), room.nbytes)
            for name in (*room.pipes, *map(_alive, range(size))):
                os.mkfifo(folder / name)
            cleaning.push(made.pop_all())
            return folder
    return None


def _open_private(folder: str) -> int | None:
    """Open a folder that only this user can have created or changed; return None for any other.

    Its name comes from a store that other users of the host can reach, and its content is unpickled.
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
    """Allocate `length` bytes to the file: touching a page that does not exist would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)
    else:
        os.write(descriptor, bytes(length))


class StoreExchange:
    """Messages and votes between the ranks of a process group, over its store, during a set-up.

    A gather over the CPU group `group` takes a message between each pair of ranks; this takes a few store requests per
    rank. `tell` and `vote` do not wait for other ranks, so a rank can set up several groups at once. Every rank of the
    group creates the same number of exchanges; ranks wait as long as the group's collectives do.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self.index = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.timeout = process_group_timeout(group)
        store = default_store()
        place = f"threefold/exchange/{group.group_name}"
        count = store.add(f"{place}/{self.index}", 1)  # equal on every rank: none reads an earlier exchange's messages
        self._store = dist.PrefixStore(f"{place}/{count}th", store)

    def tell(self, name: str, text: str) -> None:
        """Send text to every rank under a name; only one rank of the group does so."""
        self._store.set(name, text)

    def told(self, name: str) -> str:
        """Wait for the text that a rank sends under this name, and return it."""
        self._store.wait([name], timedelta(seconds=self.timeout))
        return str(self._store.get(name).decode())

    def vote(self, name: str, yes: bool) -> None:
        """Vote on a question; every rank of the group does so once."""
        count = self._store.add(f"{name}/votes", 1 if yes else 1 + _REFUSAL)
        if count % _REFUSAL == len(self.ranks):
            self._store.set(name, str(int(count < _REFUSAL)))

    def agreed(self, name: str) -> bool:
        """Wait until all ranks have voted on a question; return whether all voted for it."""
        return self.told(name) == "1"


def poller(pipe: int, alive: Mapping[int, int]) -> select.poll:
    """Create a poll object that wakes when a pipe has content or one of the ranks of `alive` has ended."""
    made = select.poll()
    for descriptor in alive.values():
        made.register(descriptor, 0)  # hang-ups are always reported
    made.register(pipe, select.POLLIN)
    return made


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
