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


@dataclass(frozen=True)
class Shared:
    """The shared memory and pipes of a group, as one of its ranks has them.

    Attributes:
        ranks: their global ranks.
        index: this process's index among them.
        memory: two slots of equal size for each.
        inboxes, outboxes: file descriptors of pipes, by peer index.
        timeout: seconds to wait for a peer at most.
    """

    ranks: list[int]
    index: int
    memory: mmap.mmap
    inboxes: dict[int, int]
    outboxes: dict[int, int]
    timeout: float


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
    peers = [(index + step) % len(ranks) for step in range(1, len(ranks))]
    with contextlib.ExitStack() as opened:  # closes the pipes again unless every rank gets to the end

        def open_pipes(paths: dict[int, Path], mode: int) -> dict[int, int]:
            descriptors = {}
            for peer, path in paths.items():
                descriptors[peer] = os.open(path, mode | os.O_NONBLOCK)  # opening must not wait for the other end
                opened.callback(os.close, descriptors[peer])
                os.set_blocking(descriptors[peer], True)
            return descriptors

        def map_and_open_inboxes() -> tuple[mmap.mmap, dict[int, int]]:
            return _map_memory(folder), open_pipes({p: folder / f"{p}-{index}" for p in peers}, os.O_RDONLY)

        begun = _together(group, map_and_open_inboxes)
        # A pipe can be opened for writing once its reader is there, and all readers are after the line above.
        outboxes = _together(group, lambda: open_pipes({p: folder / f"{index}-{p}" for p in peers}, os.O_WRONLY))
        if begun is None or outboxes is None:
            return None
        memory, inboxes = begun
        opened.pop_all()
        # What the group's own collectives wait at most.
        timeout = process_group_timeout(group)
        return Shared(ranks, index, memory, inboxes, outboxes, timeout)


def _host() -> tuple[str, str]:
    """An identifier of this host, also where hosts share a file system or a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""


def _make_folder(size: int, capacity: int) -> Path | None:
    """A new folder with the memory and pipes of `size` ranks, in memory where possible; None if there is no room."""
    slot = -(-max(capacity, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    for parent in ("/dev/shm", tempfile.gettempdir()):
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="threefold-", dir=parent))
            with open(folder / "memory", "wb") as file:
                _reserve(file.fileno(), 2 * size * slot)
            for source in range(size):
                for target in range(size):
                    if source != target:
                        os.mkfifo(folder / f"{source}-{target}")
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
