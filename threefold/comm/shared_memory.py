"""Collectives between processes of one host through shared memory: for CPU tensors, without sockets.

Every collective consists of one primitive, the *round*: fill your own slot, wait until all ranks have
(`Turnstile.meet`), then read any slot. Slots are double-buffered by the parity of the round. A rank fills its slot for
round n + 2 only after round n + 1, which a peer enters only after reading what it needs of round n, so that no
acknowledgement is needed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.comm.segments import SIGNAL_BYTES, PeerLostError, Shared, Turnstile, room_for_rounds, share, whole_pages

__all__ = ["PeerLostError", "SharedMemoryGroup", "accumulate"]

DEFAULT_CAPACITY = 2 << 20
"""Bytes of one slot; a longer message is split into pieces of this size."""

_TWO_PHASE_BYTES = 1 << 20
"""Threshold of piece bytes · (ranks − 2) from which ranks divide the additions instead of each doing all (measured with
3, 4 and 8 ranks on two cores; below it, the second round costs more than the additions saved)."""

_SHARE_BYTES = 64
"""Alignment of the shares, so that no two ranks write to one cache line."""

_KEPT_VIEWS = 256
"""Number of message sizes whose views of the slots are cached; a training step has a few."""

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
_OPERATION_CODES = {name: code for code, name in enumerate(_OPERATIONS)}


class _Views(NamedTuple):
    """Slots of the rounds of one parity, viewed for messages of one dtype and size.

    Attributes:
        slots: [elements] of each rank.
        rows: the slots as one tensor, [ranks, elements].
        shares: of each rank's slot, the elements that this rank adds up if ranks divide the additions.
        result: [elements] of the sum, to which all ranks write their shares.
        own_share: this rank's share of `result`.
    """

    slots: list[Tensor]
    rows: Tensor
    shares: list[Tensor]
    result: Tensor
    own_share: Tensor


class SharedMemoryGroup:
    """Ranks of one process group, all on one host, with collectives of CPU tensors in shared memory.

    Every rank of the group must call the same operations in the same order, with tensors of the same size and dtype; a
    `RuntimeError` names a rank that does not. Results are equal bit for bit on all ranks, because additions follow the
    order of the ranks. bfloat16 and float16 are summed in float32 and rounded once; sums and maxima of bool are the
    logical or. Operations are not differentiable and block until done; only one thread at a time may use a group.

    Attributes:
        size: number of ranks.
        index: index of this process among them.
        ranks: their global ranks.
    """

    def __init__(self, shared: Shared, sharing_bytes: int = _TWO_PHASE_BYTES) -> None:
        """Wrap memory and pipes that are already set up; `try_create` sets them up."""
        self._sharing_bytes = sharing_bytes
        self.ranks = shared.ranks
        self.index = shared.index
        self.size = len(shared.ranks)
        signals = whole_pages(2 * self.size * SIGNAL_BYTES)
        slots = torch.frombuffer(shared.memory, dtype=torch.uint8, offset=signals)
        self._slots = slots.view(2, self.size + 1, -1)
        self._capacity = self._slots.shape[-1]
        self._turnstile = Turnstile(shared, _OPERATIONS, tuple(map(str, _DTYPES)))
        self._views: dict[tuple[torch.dtype, int], tuple[_Views, _Views]] = {}

    @classmethod
    def try_create(cls, group: dist.ProcessGroup, capacity: int = DEFAULT_CAPACITY) -> "SharedMemoryGroup | None":
        """Set up shared memory between the ranks of `group`; a collective call, with the same answer on every rank.

        Args:
            group: gloo process group, which exchanges the names.
            capacity: bytes of one slot, rounded up to whole pages; the group takes 2 · (ranks + 1) · capacity bytes.

        Returns:
            the group; None if the ranks are not all on one host, or the host has no room for the memory.
        """
        return cls.try_create_all([group], capacity)[0]

    @classmethod
    def try_create_all(
        cls,
        groups: Sequence[dist.ProcessGroup],
        capacity: int = DEFAULT_CAPACITY,
        sharing_bytes: int = _TWO_PHASE_BYTES,
    ) -> "list[SharedMemoryGroup | None]":
        """Set up shared memory for several groups at once, in hardly more time than for one.

        Args:
            groups: process groups, in one order on all their ranks.
            capacity: bytes of one slot, as for `try_create`.
            sharing_bytes: threshold of piece bytes · (ranks − 2) from which the ranks divide the additions of a piece.
        """
        made = share(groups, partial(room_for_rounds, capacity=capacity))
        return [cls(shared, sharing_bytes) if shared else None for shared in made]

    def close(self) -> None:
        """Close the pipes and free the memory. Peers that wait for this rank raise `PeerLostError`."""
        self._turnstile.close()
        self._views.clear()
        self._slots = torch.empty(0, dtype=torch.uint8)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor`, of any shape, over the ranks."""
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
        self._reduce("all_reduce_", _flat(tensor), out.view(-1), torch.add)
        return out

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, of any shape, by its sum over the ranks, and return it."""
        flat = _flat(tensor)
        self._reduce("all_reduce_", flat, flat, torch.add)
        return _write_back(flat, tensor)

    def all_reduce_max_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, of any shape, by its maximum over the ranks (NaN if any rank has NaN), and return it."""
        flat = _flat(tensor)
        self._reduce("all_reduce_max_", flat, flat, torch.maximum)
        return _write_back(flat, tensor)

    def all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the tensors of all ranks, stacked: [ranks, *tensor.shape].

        Args:
            tensor: tensor of one shape on all ranks; it may be this rank's place in `out`.
            out: contiguous tensor for the result, with as many elements; None for a new one.
        """
        flat = _flat(tensor)
        gathered = (flat.new_empty(self.size * flat.numel()) if out is None else out).view(self.size, flat.numel())
        for start, count in self._pieces(flat, self._elements(flat.dtype)):
            views = self._exchange("all_gather", flat[start : start + count])
            gathered[:, start : start + count].copy_(views.rows)
        return gathered.view(self.size, *tensor.shape)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Gather bytes of any length from each rank, many times faster than gloo, which sends them around a ring."""
        sizes = self.all_gather(torch.tensor([len(content)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        gathered = self.all_gather(padded)
        return [part[:size].numpy().tobytes() for part, size in zip(gathered, sizes, strict=True)]

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the sum over ranks of `tensor` [ranks · n, ...]: [n, ...], parts in rank order."""
        if tensor.dim() == 0 or tensor.shape[0] % self.size:
            raise ValueError(f"dim 0 of shape {[*tensor.shape]} cannot be scattered evenly over {self.size} ranks")
        flat = _flat(tensor)
        parts = flat.view(self.size, flat.numel() // self.size)
        out = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        own = out.view(-1)
        for start, count in self._pieces(own, self._elements(flat.dtype) // self.size):
            views = self._exchange("reduce_scatter", parts[:, start : start + count])
            offset = self.index * count
            accumulate(torch.add, [slot[offset : offset + count] for slot in views.slots], own[start : start + count])
        return out

    def broadcast_(self, tensor: Tensor, source_index: int) -> Tensor:
        """Replace `tensor`, of any shape, by that of the rank at `source_index` of the group, and return it."""
        if not 0 <= source_index < self.size:
            raise ValueError(f"source_index {source_index} is not in a group of {self.size} ranks")
        flat = _flat(tensor)
        for start, count in self._pieces(flat, self._elements(flat.dtype)):
            piece = flat[start : start + count]
            slot = self._views_of(flat.dtype, count).slots[source_index]
            if self.index == source_index:
                slot.copy_(piece)
            self._round("broadcast_", flat.dtype, count, source_index)
            if self.index != source_index:
                piece.copy_(slot)
        return _write_back(flat, tensor)

    def barrier(self) -> None:
        self._round("barrier", torch.uint8, 0)

    # -- implementation --------------------------------------------------------------------------------------------

    def _reduce(self, operation: str, source: Tensor, target: Tensor, combine: Callable[..., Tensor]) -> None:
        for start, count in self._pieces(source, self._elements(source.dtype)):
            views = self._exchange(operation, source[start : start + count])
            piece = target[start : start + count]
            if self._divides_additions(piece):  # each rank combines its share; then all read all shares
                accumulate(combine, views.shares, views.own_share)
                self._round(operation, piece.dtype, count)
                piece.copy_(views.result)
            else:
                accumulate(combine, views.slots, piece)

    def _divides_additions(self, piece: Tensor) -> bool:
        added = torch.float32.itemsize if piece.dtype in _HALVES else piece.itemsize
        return (self.size - 2) * piece.numel() * added >= self._sharing_bytes

    def _exchange(self, operation: str, piece: Tensor) -> _Views:
        """Run one round in which every rank contributes `piece`; return all slots, each with its rank's piece."""
        views = self._views_of(piece.dtype, piece.numel())
        views.slots[self.index].view(piece.shape).copy_(piece)
        self._round(operation, piece.dtype, piece.numel())
        return views

    def _round(self, operation: str, dtype: torch.dtype, count: int, source: int = 0) -> None:
        """Wait until all ranks have filled their slots, then switch to the other slots."""
        self._turnstile.meet(_OPERATION_CODES[operation], _DTYPE_CODES[dtype], count, source)

    def _views_of(self, dtype: torch.dtype, count: int) -> _Views:
        key = dtype, count
        if key not in self._views:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            self._views[key] = self._make_views(self._slots[0], *key), self._make_views(self._slots[1], *key)
        return self._views[key][self._turnstile.parity]

    def _make_views(self, slots: Tensor, dtype: torch.dtype, count: int) -> _Views:
        *each, result = (slot.view(dtype)[:count] for slot in slots)
        share = -(-count * dtype.itemsize // (self.size * _SHARE_BYTES)) * _SHARE_BYTES // dtype.itemsize
        own = slice(share * self.index, share * (self.index + 1))
        return _Views(each, slots[:-1].view(dtype)[:, :count], [slot[own] for slot in each], result, result[own])

    def _elements(self, dtype: torch.dtype) -> int:
        if dtype not in _DTYPE_CODES:
            raise TypeError(f"shared-memory collectives do not support {dtype}")
        return self._capacity // dtype.itemsize

    @staticmethod
    def _pieces(flat: Tensor, longest: int) -> list[tuple[int, int]]:
        total = flat.numel()
        return [(start, min(longest, total - start)) for start in range(0, total, longest)]


class PostponedSum(NamedTuple):
    """An in-place all-reduce that runs when it is waited for.

    Ranks that copy and add on their own cores gain nothing from an earlier start, which would only make them wait in
    the middle of a backward pass.
    """

    group: SharedMemoryGroup
    tensor: Tensor

    def wait(self) -> None:
        self.group.all_reduce_(self.tensor)


def _flat(tensor: Tensor) -> Tensor:
    """Return `tensor` as one contiguous dim, sharing its memory if possible."""
    if tensor.device.type != "cpu":
        raise ValueError(f"shared-memory collectives take CPU tensors, got one on {tensor.device}")
    return tensor.detach().reshape(-1)


def _write_back(flat: Tensor, tensor: Tensor) -> Tensor:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def accumulate(combine: Callable[..., Tensor], parts: list[Tensor], out: Tensor) -> None:
    """Combine `parts` in order into `out`, rounding only once."""
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
