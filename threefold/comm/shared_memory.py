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

import itertools
import os
import select
import struct
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.comm.shared_memory_setup import Shared, share

T = TypeVar("T")

DEFAULT_CAPACITY = 2 << 20
"""Bytes of one slot; a longer message goes in pieces of this size."""

_TWO_PHASE_BYTES = 1 << 20
"""From this size on, three ranks or more divide the additions among them instead of each doing all (measured: 3–8 ranks
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

    Attributes: `size` ranks; `index`, the index of this process among them; `ranks`, their global ranks.
    """

    def __init__(self, shared: Shared) -> None:
        """Wrap memory and pipes that are set up already; use `try_create`, which sets them up."""
        self.ranks = shared.ranks
        self.index = shared.index
        self.size = len(shared.ranks)
        self._bytes = torch.frombuffer(shared.memory, dtype=torch.uint8)
        self._capacity = len(shared.memory) // (2 * self.size)
        self._inboxes = shared.inboxes
        self._outboxes = shared.outboxes
        self._pollers = {peer: _poller(descriptor) for peer, descriptor in shared.inboxes.items()}
        self._timeout = shared.timeout
        self._closed = weakref.finalize(self, _close, [*shared.inboxes.values(), *shared.outboxes.values()])
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
        shared = share(group, capacity)
        return cls(shared) if shared else None

    def close(self) -> None:
        """Close the pipes and free the memory. Peers that wait for this rank then raise `PeerLostError`."""
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
        out = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        own = out.view(-1)
        for start, count in self._pieces(own, self._elements(flat.dtype) // self.size):
            slots = self._exchange("reduce_scatter", parts[:, start : start + count])
            offset = self.index * count
            accumulate(torch.add, [slot[offset : offset + count] for slot in slots], own[start : start + count])
        return out

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

    # -- implementation --------------------------------------------------------------------------------------------

    def _reduce(self, operation: str, source: Tensor, target: Tensor, combine: Callable[..., Tensor]) -> None:
        for start, count in self._pieces(source, self._elements(source.dtype)):
            piece = target[start : start + count]
            slots = self._exchange(operation, source[start : start + count])
            if self.size > 2 and count * source.itemsize >= _TWO_PHASE_BYTES:
                self._reduce_shared(operation, [slot[:count] for slot in slots], piece, combine)
            else:
                accumulate(combine, [slot[:count] for slot in slots], piece)

    def _reduce_shared(
        self, operation: str, filled: list[Tensor], piece: Tensor, combine: Callable[..., Tensor]
    ) -> None:
        """Each rank combines its share of the elements into its next slot; then all read all shares."""
        count = piece.numel()
        bounds = [count * rank // self.size for rank in range(self.size + 1)]
        shares = list(itertools.pairwise(bounds))
        slots = self._slots(piece.dtype)
        first, last = shares[self.index]
        accumulate(combine, [slot[first:last] for slot in filled], slots[self.index][: last - first])
        self._round(operation, piece.dtype, count)
        for slot, (first, last) in zip(slots, shares, strict=True):
            piece[first:last].copy_(slot[: last - first])

    def _exchange(self, operation: str, piece: Tensor) -> list[Tensor]:
        """One round in which every rank contributes `piece`; returns all slots, each with its rank's piece first."""
        slots = self._slots(piece.dtype)
        slots[self.index][: piece.numel()].view(piece.shape).copy_(piece)
        self._round(operation, piece.dtype, piece.numel())
        return slots

    def _round(self, operation: str, dtype: torch.dtype, count: int, source: int = 0) -> None:
        """Signal all peers that this rank's slot is filled, wait for their signals, then switch to the other slots."""
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
            raise TypeError(f"shared-memory collectives do not support {dtype}")
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
    """Copy a result computed in `flat` to `tensor`, unless they share memory."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def accumulate(combine: Callable[..., Tensor], parts: list[Tensor], out: Tensor) -> None:
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
