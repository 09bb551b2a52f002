"""Process groups of processes on one host, whose collectives of CPU tensors go through shared memory.

Every collective in shared memory consists of one primitive, the *round*: fill your own slot, wait until all ranks have
(`Barrier.meet`), then read any slot. Slots are double-buffered by the parity of the round. A rank fills its slot for
round n + 2 only after round n + 1, which a peer enters only after reading the slots of round n that it needs. So no
acknowledgement is needed.
"""

import os
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.comm.axis import HostGroup
from threefold.comm.tree import HALVES, PostponedWork, accumulate
from threefold.cpu.segments import (
    SIGNAL_BYTES,
    Shared,
    close_all,
    poller,
    room_for_rounds,
    share,
    tickets,
    whole_pages,
)
from threefold.errors import PeerLostError
from threefold.torch_private.distributed import Work, stand_in


class SharedMemorySizes(NamedTuple):
    """Sizes at which shared-memory collectives split their work; they change no result."""

    slot: int = 2 << 20
    """Bytes of a chunk of a message; larger chunks fall out of the cache that the ranks share."""
    sharing: int = 1 << 20
    """Value of chunk bytes · (ranks − 2) at or above which ranks divide the additions of a chunk: measured with 3, 4
    and 8 ranks on two cores; below it, the second round costs more than the additions saved."""


USUAL_SIZES = SharedMemorySizes()

_PART_BYTES = 64
"""Alignment of the parts, so that no two ranks write to one cache line."""

_KEPT_VIEWS = 256
"""Number of message sizes whose views of the slots are cached; a training step has a few."""

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

_OPERATIONS = ("all_reduce_", "all_reduce_max_", "all_gather", "reduce_scatter", "broadcast_", "barrier")
_OPERATION_CODES = {name: code for code, name in enumerate(_OPERATIONS)}


def over_shared_memory(
    groups: Sequence[dist.ProcessGroup],
    capacity: int = USUAL_SIZES.slot,
    sharing_bytes: int = USUAL_SIZES.sharing,
    rounding: bool = False,
) -> list[dist.ProcessGroup]:
    """Return each gloo group as a `SharedMemoryGroup`, or itself if it cannot share memory.

    Collective over each group, with the same answer on all of its ranks. A group cannot share memory if its ranks are
    not all on one host, or the host has no room for 2 · (ranks + 1) slots of `capacity` bytes, in whole pages. Several
    groups, in the same order on all their ranks, are set up in hardly more time than one. With `rounding`, every
    addition is rounded to the tensors' dtype, as in an exact run.
    """
    made = share(groups, partial(room_for_rounds, capacity=capacity))
    return [
        SharedMemoryGroup(group, shared, sharing_bytes, rounding) if shared else group
        for group, shared in zip(groups, made, strict=True)
    ]


class _Views(NamedTuple):
    """Slots of the rounds of one parity, viewed for messages of one dtype and size."""

    slots: list[Tensor]  # [elements] of each rank
    rows: Tensor  # the slots as one tensor, [ranks, elements]
    parts: list[Tensor]  # the elements of each rank's slot that this rank adds if ranks divide the additions
    result: Tensor  # [elements] of the sum, to which all ranks write their parts
    local_part: Tensor  # this rank's part of `result`


class SharedMemoryGroup(HostGroup):
    """Process group of ranks on one host, with collectives of CPU tensors in shared memory, the others through gloo.

    `torch.distributed` accepts it wherever it accepts the gloo group. Every rank must call the same operations in the
    same order, with tensors of the same size and dtype; a `RuntimeError` names a rank that does not. Results are equal
    bit for bit on all ranks, because additions follow a binary tree over the ranks. bfloat16 and float16 are summed in
    float32 and rounded once, unless every addition is rounded (`rounding`); sums and maxima of bool are the logical or.
    Operations are done when they return, except all-reduces with `async_op`, which run when they are waited for. Only
    one thread at a time may use a group.
    """

    def __init__(
        self, gloo: dist.ProcessGroup, shared: Shared, sharing_bytes: int = USUAL_SIZES.sharing, rounding: bool = False
    ) -> None:
        """Wrap memory and pipes that are already set up; `over_shared_memory` sets them up."""
        self._index, self._size = shared.index, len(shared.ranks)
        super().__init__(self._index, self._size)
        stand_in(self, gloo)
        self._gloo, self._sharing_bytes, self._rounding = gloo, sharing_bytes, rounding
        signals = whole_pages(2 * self._size * SIGNAL_BYTES)
        slots = torch.frombuffer(shared.memory, dtype=torch.uint8, offset=signals)
        self._slots = slots.view(2, self._size + 1, -1)
        self._capacity = self._slots.shape[-1]
        self._barrier = Barrier(shared, _OPERATIONS, tuple(map(str, _DTYPES)))
        self._views: dict[tuple[torch.dtype, int], tuple[_Views, _Views]] = {}

    def close(self) -> None:
        """Close the pipes and free the memory. Peers that wait for this rank raise `PeerLostError`."""
        self._barrier.close()
        self._views.clear()
        self._slots = torch.empty(0, dtype=torch.uint8)

    def sum_of(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor`, of any shape, over the ranks: `all_reduce` without a copy of the summand."""
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
        if not self._takes(tensor):
            dist.all_reduce(out.copy_(tensor.detach()), group=self._gloo)
            return out
        self._reduce("all_reduce_", _flat(tensor), out.view(-1), torch.add)
        return out

    # -- collectives, each with the arguments of torch's method of that name ----------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        sums, (tensor,) = opts.reduceOp == dist.ReduceOp.SUM, tensors
        if not (sums or opts.reduceOp == dist.ReduceOp.MAX) or not self._takes(tensor):
            return self._gloo.allreduce(tensors, opts)
        if opts.asyncOp:
            # Ranks that copy and add on their own cores gain nothing from an earlier start, which would only make them
            # wait in the middle of a backward pass.
            return PostponedWork(partial(self._all_reduce_, tensor, sums))
        self._all_reduce_(tensor, sums)
        return _DONE

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        (parts,), (tensor,) = outputs, inputs
        if not self._takes(tensor):
            return self._gloo.allgather(outputs, inputs, opts)
        gathered = tensor.new_empty(self._size, tensor.numel())
        self._all_gather(_flat(tensor), gathered)
        for part, found in zip(parts, gathered, strict=True):
            part.copy_(found.view(part.shape))
        return _DONE

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        """Gather equal tensors; `source` may be this rank's place in `output`."""
        if not self._takes(source):
            return self._gloo.all_gather_single(output, source, opts)
        self._all_gather(_flat(source), output.view(self._size, source.numel()))
        return _DONE

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        if opts.reduceOp != dist.ReduceOp.SUM or not self._takes(source):
            return self._gloo.reduce_scatter_single(output, source, opts)
        parts, local = _flat(source).view(self._size, output.numel()), output.view(-1)
        for start, count in self._chunks(local, self._capacity // (source.itemsize * self._size)):
            views = self._exchange("reduce_scatter", parts[:, start : start + count])
            summands = [slot.view(self._size, count)[self._index] for slot in views.slots]
            self._accumulate(torch.add, summands, local[start : start + count])
        return _DONE

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        if not self._takes(tensor):
            return self._gloo.broadcast(tensors, opts)
        flat = _flat(tensor)
        for start, count in self._chunks(flat, self._capacity // flat.itemsize):
            chunk = flat[start : start + count]
            slot = self._views_of(flat.dtype, count).slots[opts.rootRank]
            if self._index == opts.rootRank:
                slot.copy_(chunk)
            self._round("broadcast_", flat.dtype, count, opts.rootRank)
            if self._index != opts.rootRank:
                chunk.copy_(slot)
        _write_back(flat, tensor)
        return _DONE

    def barrier(self, opts: Any) -> Work:
        self._round("barrier", torch.uint8, 0)
        return _DONE

    # -- implementation --------------------------------------------------------------------------------------------

    @staticmethod
    def _takes(tensor: Tensor) -> bool:
        return tensor.is_cpu and tensor.dtype in _DTYPE_CODES

    def _all_reduce_(self, tensor: Tensor, sums: bool) -> None:
        name, combine = ("all_reduce_", torch.add) if sums else ("all_reduce_max_", torch.maximum)
        flat = _flat(tensor)
        self._reduce(name, flat, flat, combine)
        _write_back(flat, tensor)

    def _all_gather(self, flat: Tensor, gathered: Tensor) -> None:
        for start, count in self._chunks(flat, self._capacity // flat.itemsize):
            views = self._exchange("all_gather", flat[start : start + count])
            gathered[:, start : start + count].copy_(views.rows)

    def _reduce(self, operation: str, source: Tensor, target: Tensor, combine: Callable[..., Tensor]) -> None:
        for start, count in self._chunks(source, self._capacity // source.itemsize):
            views = self._exchange(operation, source[start : start + count])
            chunk = target[start : start + count]
            added = torch.float32.itemsize if chunk.dtype in HALVES else chunk.itemsize
            if (self._size - 2) * chunk.numel() * added >= self._sharing_bytes:
                # Each rank combines its part; then all read all parts.
                self._accumulate(combine, views.parts, views.local_part)
                self._round(operation, chunk.dtype, count)
                chunk.copy_(views.result)
            else:
                self._accumulate(combine, views.slots, chunk)

    def _accumulate(self, combine: Callable[..., Tensor], parts: list[Tensor], out: Tensor) -> None:
        accumulate(combine, parts, out, self._rounding)

    def _exchange(self, operation: str, chunk: Tensor) -> _Views:
        """Run one round in which every rank contributes `chunk`; return all slots, each with its rank's chunk."""
        views = self._views_of(chunk.dtype, chunk.numel())
        views.slots[self._index].view(chunk.shape).copy_(chunk)
        self._round(operation, chunk.dtype, chunk.numel())
        return views

    def _round(self, operation: str, dtype: torch.dtype, count: int, source: int = 0) -> None:
        """Wait until all ranks have filled their slots, then switch to the other slots."""
        self.require_collectives()
        self._barrier.meet(_OPERATION_CODES[operation], _DTYPE_CODES[dtype], count, source)

    def _views_of(self, dtype: torch.dtype, count: int) -> _Views:
        key = dtype, count
        if key not in self._views:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            self._views[key] = self._make_views(self._slots[0], *key), self._make_views(self._slots[1], *key)
        return self._views[key][self._barrier.parity]

    def _make_views(self, slots: Tensor, dtype: torch.dtype, count: int) -> _Views:
        *each, result = (slot.view(dtype)[:count] for slot in slots)
        length = -(-count * dtype.itemsize // (self._size * _PART_BYTES)) * _PART_BYTES // dtype.itemsize
        local = slice(length * self._index, length * (self._index + 1))
        return _Views(each, slots[:-1].view(dtype)[:, :count], [slot[local] for slot in each], result, result[local])

    @staticmethod
    def _chunks(flat: Tensor, longest: int) -> list[tuple[int, int]]:
        total = flat.numel()
        return [(start, min(longest, total - start)) for start in range(0, total, longest)]


_DONE = PostponedWork()


def _flat(tensor: Tensor) -> Tensor:
    """Return `tensor` as one contiguous dim, sharing its memory if possible."""
    return tensor.detach().reshape(-1)


def _write_back(flat: Tensor, tensor: Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


_SIGNAL = struct.Struct("<QBBHI")  # round number, operation, dtype, source index, elements in this round
assert _SIGNAL.size == SIGNAL_BYTES
_FIRST = 2  # even, as the first pipe has the tickets; nonzero, as the memory is zero at first


class Barrier:
    """Meeting point of a group of processes, round by round; errors name `operations` and `dtypes` by their codes."""

    def __init__(self, shared: Shared, operations: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
        self._ranks, self._index, self._timeout = shared.ranks, shared.index, shared.timeout
        self._operations, self._dtypes = operations, dtypes
        self._number = _FIRST
        size = len(shared.ranks)
        signals = memoryview(shared.memory)[: 2 * size * SIGNAL_BYTES]
        self._signals = (signals[: size * SIGNAL_BYTES], signals[size * SIGNAL_BYTES :])
        self._tickets, self._pipes, self._alive = tickets(size), shared.pipes, shared.alive
        self._pollers = tuple(poller(pipe, shared.alive) for pipe in shared.pipes)
        self._closed = weakref.finalize(self, close_all, shared.descriptors)

    @property
    def parity(self) -> int:
        """Parity of the next round, 0 or 1."""
        return self._number & 1

    def close(self) -> None:
        """Close the pipes. Peers that wait for this rank raise `PeerLostError`."""
        self._closed()
        for signals in self._signals:
            signals.release()

    def meet(self, operation: int, dtype: int, count: int, source: int = 0) -> None:
        """Wait until every rank has called this for the same operation; what they wrote before is then visible.

        Raises a `PeerLostError` if another rank has ended, a `TimeoutError` if it has not arrived in time, and a
        `RuntimeError` if it called a different operation.
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
        pipe = self._pipes[exit]
        events = dict(self._pollers[exit].poll(self._timeout * 1000))
        if pipe in events:
            return
        if not events:
            missing = self._ranks[self._missing(number)]
            raise TimeoutError(f"{self._me} has waited {self._timeout:g} s in {operation} for rank {missing}")
        # A peer may end after it has passed; what it wrote is visible by then.
        if not poller(pipe, {}).poll(0):
            lost = next(peer for peer, descriptor in self._alive.items() if descriptor in events)
            raise PeerLostError(f"rank {self._ranks[lost]} ended while {self._me} was in {operation}")

    def _missing(self, number: int) -> int:
        """Return the first index that has not reached a round; the last index if all have just reached it."""
        come = [at == number for at, *_ in _SIGNAL.iter_unpack(self._signals[number & 1])]
        return come.index(False) if False in come else len(come) - 1

    def _raise_difference(self, found: bytes, mine: bytes) -> None:
        signals = [found[start : start + SIGNAL_BYTES] for start in range(0, len(found), SIGNAL_BYTES)]
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
