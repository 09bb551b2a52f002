"""Collectives between processes of one host, through memory they share: for CPU tensors, without sockets.

Every collective is built from one primitive, the *round*: fill your own slot, signal every peer, wait for every peer's
signal, then read any slot. Slots are double-buffered by the parity of the round. A rank fills its slot for round n + 2
only after it has received all signals of round n + 1, and a peer sends that one only after it has read what it needed
of round n; so one signal per round and pair is enough, and nothing has to be acknowledged.

Signals are eight bytes through a named pipe, one pipe for each ordered pair of ranks. Reading one blocks (processes
that share a core must not spin), orders the memory accesses around it, works the same on Linux and macOS, and ends with
end-of-file when the writer dies. Measured with four pairs of processes on two cores, pipes, eventfd, futexes and
semaphores all take about ten microseconds for an exchange; only pipes and sockets notice a dead peer.
"""

import contextlib
import itertools
import mmap
import os
import platform
import select
import shutil
import struct
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

DEFAULT_CAPACITY = 2 << 20
"""Bytes of one slot; a longer message goes in pieces of this size."""

_TWO_PHASE_BYTES = 1 << 20
"""From this size on, three ranks or more share out the additions instead of each doing all of them (measured: 3–8 ranks
on two cores; below it the second round costs more than the additions saved)."""

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_HALVES = (torch.bfloat16, torch.float16)

_OPERATIONS = ("all_reduce_", "all_reduce_max_", "all_gather", "reduce_scatter", "broadcast_", "barrier")
_SIGNAL = struct.Struct("<BBHI")  # operation, dtype, source index, elements in this round


class PeerLostError(ConnectionError):
    """A process of the group has ended while this one was waiting for it."""


class SharedMemoryGroup:
    """The ranks of one process group, all on one host, with collectives over CPU tensors in shared memory.

    Every rank of the group must call the same operations in the same order, with tensors of the same size and dtype; a
    rank that does not is named in a `RuntimeError`. Results are equal bit for bit on all ranks, since additions are
    made in the order of the ranks. bfloat16 and float16 are summed in float32 and rounded once; sums and maxima of bool
    are the logical or. Operations are not differentiable and block until done; one thread at a time may use a group.

    Attributes: `size` ranks; `index`, the place of this process among them; `ranks`, their global ranks.
    """

    def __init__(
        self,
        ranks: list[int],
        index: int,
        memory: mmap.mmap,
        inboxes: dict[int, int],
        outboxes: dict[int, int],
        timeout: float,
    ) -> None:
        """Wrap resources already shared; use `try_create`, which shares them.

        `memory` holds two slots of equal size per rank; `inboxes` and `outboxes` are file descriptors by peer index;
        `timeout` is in seconds.
        """
        self.ranks = ranks
        self.index = index
        self.size = len(ranks)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._capacity = len(memory) // (2 * self.size)
        self._inboxes = inboxes
        self._outboxes = outboxes
        self._pollers = {peer: _poller(descriptor) for peer, descriptor in inboxes.items()}
        self._timeout = timeout
        self._closed = weakref.finalize(self, _close, [*inboxes.values(), *outboxes.values()])
        self._parity = 0
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}

    @classmethod
    def try_create(cls, group: dist.ProcessGroup, capacity: int = DEFAULT_CAPACITY) -> "SharedMemoryGroup | None":
        """Set up shared memory between the ranks of `group`; a collective call, with the same answer on every rank.

        Args:
            group: a gloo process group, through which names are exchanged.
            capacity: bytes of one slot, rounded up to whole pages; the group takes 2 · ranks · capacity bytes.

        Returns None when the ranks are not all on one host, or the host has no room for the memory.
        """
        return _create(cls, group, capacity)

    def close(self) -> None:
        """Close the pipes and let go of the memory. Peers that wait for this rank then raise `PeerLostError`."""
        self._closed()
        self._inboxes, self._outboxes, self._views = {}, {}, {}
        self._bytes = torch.empty(0, dtype=torch.uint8)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor`, of any shape, over the ranks."""
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
        self._reduce("all_reduce_", _flat(tensor), out.view(-1), torch.add)
        return out

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, of any shape, by its sum over the ranks; returns it."""
        flat = _flat(tensor)
        self._reduce("all_reduce_", flat, flat, torch.add)
        return _write_back(flat, tensor)

    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, of any shape, by its largest values over the ranks (NaN if any is); returns it."""
        flat = _flat(tensor)
        self._reduce("all_reduce_max_", flat, flat, torch.maximum)
        return _write_back(flat, tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked: [ranks, *tensor.shape]."""
        flat = _flat(tensor)
        gathered = flat.new_empty(self.size, flat.numel())
        for start, count in self._pieces(flat, self._elements(flat.dtype)):
            slots = self._exchange("all_gather", flat[start : start + count])
            for part, slot in zip(gathered, slots, strict=True):
                part[start : start + count].copy_(slot[:count])
        return gathered.view(self.size, *tensor.shape)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the sum over ranks of `tensor` [ranks · n, ...]: [n, ...], parts in rank order.

        Raises ValueError when dim 0 is not divisible by the number of ranks.
        """
        if tensor.dim() == 0 or tensor.shape[0] % self.size:
            raise ValueError(f"dim 0 of shape {[*tensor.shape]} cannot be scattered evenly over {self.size} ranks")
        flat = _flat(tensor)
        parts = flat.view(self.size, flat.numel() // self.size)
        own = torch.empty_like(parts[0])
        for start, count in self._pieces(own, self._elements(flat.dtype) // self.size):
            slots = self._exchange("reduce_scatter", parts[:, start : start + count])
            offset = self.index * count
            _accumulate(torch.add, [slot[offset : offset + count] for slot in slots], own[start : start + count])
        return own.view(tensor.shape[0] // self.size, *tensor.shape[1:])

    def broadcast_(self, tensor: Tensor, source_index: int) -> Tensor:
        """Replace `tensor`, of any shape, by that of the rank at `source_index` of the group; returns it."""
        if not 0 <= source_index < self.size:
            raise ValueError(f"source_index {source_index} is not in a group of {self.size} ranks")
        flat = _flat(tensor)
        for start, count in self._pieces(flat, self._elements(flat.dtype)):
            piece = flat[start : start + count]
            slots = self._slots(flat.dtype)
            if self.index == source_index:
                slots[self.index][:count].copy_(piece)
            self._round("broadcast_", flat.dtype, count, source_index)
            if self.index != source_index:
                piece.copy_(slots[source_index][:count])
        return _write_back(flat, tensor)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._round("barrier", torch.uint8, 0)

    # -- how they are made -----------------------------------------------------------------------------------------

    def _reduce(self, operation: str, source: Tensor, target: Tensor, combine: Callable[..., Tensor]) -> None:
        for start, count in self._pieces(source, self._elements(source.dtype)):
            piece = target[start : start + count]
            slots = self._exchange(operation, source[start : start + count])
            if self.size > 2 and count * source.itemsize >= _TWO_PHASE_BYTES:
                self._reduce_shared(operation, [slot[:count] for slot in slots], piece, combine)
            else:
                _accumulate(combine, [slot[:count] for slot in slots], piece)

    def _reduce_shared(
        self, operation: str, filled: list[Tensor], piece: Tensor, combine: Callable[..., Tensor]
    ) -> None:
        """Each rank combines its share of the elements into its next slot; then all read all shares."""
        count = piece.numel()
        bounds = [count * rank // self.size for rank in range(self.size + 1)]
        shares = list(itertools.pairwise(bounds))
        slots = self._slots(piece.dtype)
        first, last = shares[self.index]
        _accumulate(combine, [slot[first:last] for slot in filled], slots[self.index][: last - first])
        self._round(operation, piece.dtype, count)
        for slot, (first, last) in zip(slots, shares, strict=True):
            piece[first:last].copy_(slot[: last - first])

    def _exchange(self, operation: str, piece: Tensor) -> list[Tensor]:
        """One round in which every rank contributes `piece`; returns everybody's slots, which start with theirs."""
        slots = self._slots(piece.dtype)
        slots[self.index][: piece.numel()].view(piece.shape).copy_(piece)
        self._round(operation, piece.dtype, piece.numel())
        return slots

    def _round(self, operation: str, dtype: torch.dtype, count: int, source: int = 0) -> None:
        """Tell every peer that this rank's slot is filled, wait until all theirs are, then turn to the other slots."""
        signal = _SIGNAL.pack(_OPERATIONS.index(operation), _DTYPE_CODES[dtype], source, count)
        for peer, descriptor in self._outboxes.items():
            try:
                os.write(descriptor, signal)
            except BrokenPipeError:
                raise self._lost(peer, operation) from None
        for peer, descriptor in self._inboxes.items():
            received = self._receive(peer, descriptor, operation)
            if received != signal:
                if not received:
                    raise self._lost(peer, operation)
                raise RuntimeError(
                    f"rank {self.ranks[self.index]} called {_describe(signal)} "
                    f"while rank {self.ranks[peer]} called {_describe(received)}"
                )
        self._parity ^= 1

    def _receive(self, peer: int, descriptor: int, operation: str) -> bytes:
        if not self._pollers[peer].poll(self._timeout * 1000):
            waited = f"rank {self.ranks[self.index]} has waited {self._timeout:g} s in {operation}"
            raise TimeoutError(f"{waited} for rank {self.ranks[peer]}")
        return os.read(descriptor, _SIGNAL.size)

    def _lost(self, peer: int, operation: str) -> PeerLostError:
        return PeerLostError(f"rank {self.ranks[peer]} ended while rank {self.ranks[self.index]} was in {operation}")

    def _slots(self, dtype: torch.dtype) -> list[Tensor]:
        """The slots of this round, one per rank, as flat tensors of `dtype`."""
        if dtype not in self._views:
            slots = self._bytes.view(2, self.size, self._capacity)
            self._views[dtype] = [[slot.view(dtype) for slot in half] for half in slots]
        return self._views[dtype][self._parity]

    def _elements(self, dtype: torch.dtype) -> int:
        if dtype not in _DTYPE_CODES:
            raise TypeError(f"shared-memory collectives do not carry {dtype}")
        return self._capacity // dtype.itemsize

    @staticmethod
    def _pieces(flat: Tensor, longest: int) -> list[tuple[int, int]]:
        """(start, count) of the pieces `flat` goes in."""
        total = flat.numel()
        return [(start, min(longest, total - start)) for start in range(0, total, longest)]


def _poller(descriptor: int) -> select.poll:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return poller


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _flat(tensor: Tensor) -> Tensor:
    """`tensor` as one contiguous dim: the same memory where it allows that, else a copy."""
    if tensor.device.type != "cpu":
        raise ValueError(f"shared-memory collectives take CPU tensors, got one on {tensor.device}")
    return tensor.detach().reshape(-1)


def _write_back(flat: Tensor, tensor: Tensor) -> Tensor:
    """Bring a result computed in `flat` home to `tensor`, whose memory it may already be."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def _accumulate(combine: Callable[..., Tensor], parts: list[Tensor], out: Tensor) -> None:
    """Combine `parts` in their order into `out`, rounding only once."""
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) > 2 and out.dtype in _HALVES:
        total = parts[0].float()
        for part in parts[1:]:
            combine(total, part.float(), out=total)
        out.copy_(total)
    else:
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)


def _describe(signal: bytes) -> str:
    operation, dtype, source, count = _SIGNAL.unpack(signal)
    origin = f" from index {source}" if _OPERATIONS[operation] == "broadcast_" else ""
    return f"{_OPERATIONS[operation]} of {count} elements of {_DTYPES[dtype]}{origin}"


# -- setting up --------------------------------------------------------------------------------------------------------


def _create(kind: type[SharedMemoryGroup], group: dist.ProcessGroup, capacity: int) -> SharedMemoryGroup | None:
    if len(set(_everybodys(_host(), group))) > 1:
        return None
    ranks, index = dist.get_process_group_ranks(group), dist.get_rank(group)
    folder = _make_folder(len(ranks), capacity) if index == 0 else None
    try:
        shared = _everybodys(folder, group)[0]
        return _join(kind, group, shared, ranks, index) if shared else None
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)  # what is open stays; nothing is left if all of us are killed now


def _join(
    kind: type[SharedMemoryGroup], group: dist.ProcessGroup, folder: Path, ranks: list[int], index: int
) -> SharedMemoryGroup | None:
    peers = [(index + step) % len(ranks) for step in range(1, len(ranks))]
    with contextlib.ExitStack() as opened:  # closes the pipes again unless every rank gets to the end

        def open_pipes(paths: dict[int, Path], mode: int) -> dict[int, int]:
            descriptors = {}
            for peer, path in paths.items():
                descriptors[peer] = os.open(path, mode | os.O_NONBLOCK)  # opening must not wait for the other end
                opened.callback(os.close, descriptors[peer])
                os.set_blocking(descriptors[peer], True)
            return descriptors

        memory = _together(group, lambda: _map_memory(folder))
        inboxes = _together(group, lambda: open_pipes({p: folder / f"{p}-{index}" for p in peers}, os.O_RDONLY))
        # A pipe can be opened for writing once its reader is there, and all readers are after the line above.
        outboxes = _together(group, lambda: open_pipes({p: folder / f"{index}-{p}" for p in peers}, os.O_WRONLY))
        if memory is None or inboxes is None or outboxes is None:
            return None
        opened.pop_all()
        # What the group's own collectives wait at most.
        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        return kind(ranks, index, memory, inboxes, outboxes, timeout)


def _host() -> tuple[str, str]:
    """What tells this host from others, also where they share a file system or a name."""
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
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


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
