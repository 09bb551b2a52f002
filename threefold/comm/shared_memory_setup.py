"""Setting up memory and pipes between the processes of one host, for `shared_memory`."""

import contextlib
import mmap
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from threefold.torch_private.distributed import process_group_timeout

T = TypeVar("T")

SIGNAL_BYTES = 16
"""What a rank tells of each round."""
TURNSTILES = ("turnstile-0", "turnstile-1")
"""Names of the pipes that ranks pass in turn."""


@dataclass(frozen=True)
class Shared:
    """The shared memory and pipes of a group, as one of its ranks has them.

    Attributes:
        ranks: their global ranks.
        index: this process's index among them.
        memory: of `memory_bytes` bytes: a signal of each rank, twice, and from the next page on slots of equal size,
            twice as many as there are ranks and two more.
        turnstiles: file descriptors of the two pipes that every rank reads and writes; `tickets` are in the first.
        alive: by peer index, the end for reading of a pipe that the peer alone can write to.
        own: the end for writing of this rank's, which others have in `alive`.
        timeout: seconds to wait for a peer at most.
    """

    ranks: list[int]
    index: int
    memory: mmap.mmap
    turnstiles: tuple[int, int]
    alive: dict[int, int]
    own: int
    timeout: float

    @property
    def descriptors(self) -> list[int]:
        """Of all its pipes."""
        return [*self.turnstiles, *self.alive.values(), self.own]


def memory_bytes(size: int, capacity: int) -> int:
    """Bytes of a group of `size` ranks with slots of `capacity` bytes, both parts in whole pages."""
    return whole_pages(2 * size * SIGNAL_BYTES) + 2 * (size + 1) * whole_pages(capacity)


def whole_pages(length: int) -> int:
    """`length` bytes, rounded up to whole pages, one at least."""
    return -(-max(length, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def tickets(size: int) -> bytes:
    """What is in a turnstile that `size` ranks are to pass: a byte for each, of which the last is not zero."""
    return bytes(size - 1) + b"\1"


def share(group: dist.ProcessGroup, capacity: int) -> Shared | None:
    """Make memory and pipes between the ranks of `group`; a collective call, with the same answer on every rank.

    Args:
        group: a gloo process group, through which names are exchanged.
        capacity: bytes of one slot, rounded up to whole pages.

    Returns None when the ranks are not all on one host, or the host has no room for the memory.
    """
    ranks, index = dist.get_process_group_ranks(group), dist.get_rank(group)
    folder = _make_folder(len(ranks), capacity) if index == 0 else None
    try:
        hosts, folders = zip(*_everybodys((_host(), folder), group), strict=True)
        if len(set(hosts)) > 1 or folders[0] is None:
            return None
        return _join(group, folders[0], ranks, index)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)  # what is open stays; nothing is left if all of us are killed now


def _join(group: dist.ProcessGroup, folder: Path, ranks: list[int], index: int) -> Shared | None:
    peers = [peer for peer in range(len(ranks)) if peer != index]
    with contextlib.ExitStack() as opened:  # closes the pipes again unless every rank gets to the end

        def open_pipe(name: str, mode: int) -> int:
            descriptor = os.open(folder / name, mode | os.O_NONBLOCK)  # opening must not wait for the other end
            opened.callback(os.close, descriptor)
            return descriptor

        def map_and_open() -> tuple[mmap.mmap, tuple[int, int], dict[int, int]]:
            first, second = (open_pipe(name, os.O_RDWR) for name in TURNSTILES)
            if index == 0:
                os.write(first, tickets(len(ranks)))
            return _map_memory(folder), (first, second), {p: open_pipe(_alive(p), os.O_RDONLY) for p in peers}

        begun = _together(group, map_and_open)
        # A pipe can be opened for writing once it has a reader, and all readers are there after the line above.
        own = _together(group, lambda: open_pipe(_alive(index), os.O_WRONLY if peers else os.O_RDWR))
        if begun is None or own is None:
            return None
        opened.pop_all()
        # What the group's own collectives wait at most.
        return Shared(ranks, index, *begun, own, process_group_timeout(group))


def _alive(index: int) -> str:
    return f"alive-{index}"


def _host() -> tuple[str, str]:
    """An identifier of this host, also where hosts share a file system or a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""


def _make_folder(size: int, capacity: int) -> Path | None:
    """A new folder with the memory and pipes of `size` ranks, in memory where possible; None if there is no room."""
    for parent in ("/dev/shm", tempfile.gettempdir()):
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="threefold-", dir=parent))
            with open(folder / "memory", "wb") as file:
                _reserve(file.fileno(), memory_bytes(size, capacity))
            for name in (*TURNSTILES, *map(_alive, range(size))):
                os.mkfifo(folder / name)
            return folder
        except OSError:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
    return None


def _reserve(descriptor: int, length: int) -> None:
    """Give the file `length` bytes that are really there: touching a page too many would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)
    else:
        os.write(descriptor, bytes(length))


def _map_memory(folder: Path) -> mmap.mmap:
    with open(folder / "memory", "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _together(group: dist.ProcessGroup, action: Callable[[], T]) -> T | None:
    """Run `action` on every rank; its result if it raised OSError on none of them, else None on all."""
    try:
        result: T | None = action()
    except OSError:
        result = None
    return result if all(_everybodys(result is not None, group)) else None


def _everybodys(value: T, group: dist.ProcessGroup) -> list[T]:
    """`value` of every rank of the group, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
