"""Sends of CPU tensors between the ranks of one host through shared memory, without sockets, for pipeline stages.

A sender copies a tensor into a free slot of its own and writes a note into the receiver's inbox, a pipe, which wakes
the receiver if it sleeps. The receiver copies the tensor out when it needs it, and returns the slot through another
pipe, which wakes nobody. If no slot is free, the tensor goes through the process group. Its note then has a number of
at least `SLOTS` instead of a slot. The number is returned in the same way, and the sender keeps the tensor until then.

A sender never waits for a slot: it could wait for a rank that waits for it in a collective. It waits only if a pipe is
full. Pipes have room for the notes of two passes, and no rank is more than two passes ahead of another, so ranks cannot
deadlock, in whatever order they send, receive and wait for something else. Pipes order the accesses to memory around
them, as those of `Barrier` (shared_memory.py) do.
"""

import os
import select
import struct
import weakref
from collections import defaultdict
from functools import partial
from itertools import cycle
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.cpu.segments import Room, Shared, close_all, poller, share, whole_pages
from threefold.errors import PeerLostError

SLOTS: Final = 8
"""Slots of each rank; a pipeline has about two waiting messages per micro-batch in flight between two stages."""
MOST_BYTES: Final = 4 << 20
"""Largest slot. Longer messages overlap with more computation, gloo is as fast, and shared memory may be small."""

NOTE = struct.Struct("<IHHQ")  # number of the pass, index of the sender, slot, bytes
_RETURNED = struct.Struct("<H")  # slot
_TAKEN = 0xFFFF
_READ_BYTES = 4096


class _Message(NamedTuple):
    """Message that has arrived: in a slot of its sender, or received through the process group."""

    slot: int
    nbytes: int
    received: Tensor | None


class SharedMailbox:
    """Sends and receives between the ranks of a process group on one host (see `scheduled_stage.Mailbox`).

    `shared` has `SLOTS` slots of memory per rank, and pipes: inboxes of all ranks, then pipes that return slots.
    """

    def __init__(self, shared: Shared, group: dist.ProcessGroup) -> None:
        self.ranks, self._index, self._timeout, self._group = shared.ranks, shared.index, shared.timeout, group
        size = len(shared.ranks)
        self._slots = torch.frombuffer(shared.memory, dtype=torch.uint8).view(size, SLOTS, -1)
        self._inboxes, self._returns = shared.pipes[:size], shared.pipes[size:]
        self._alive = shared.alive
        self._pollers = {peer: poller(self._inboxes[self._index], {peer: end}) for peer, end in shared.alive.items()}
        self._free = list(range(SLOTS))
        self._pass = 0
        self._expected: defaultdict[int, int] = defaultdict(int)
        self._arrived: defaultdict[tuple[int, int], list[_Message]] = defaultdict(list)
        self._by_group: dict[int, tuple[dist.Work, Tensor]] = {}
        self._numbers = cycle(range(SLOTS, _TAKEN))
        self._closed = weakref.finalize(self, close_all, shared.descriptors)

    def close(self) -> None:
        """Close the pipes and free the memory. Peers that wait for this rank then raise `PeerLostError`."""
        self._closed()
        self._arrived.clear()
        self._slots = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        """Begin a pass, and drop messages of earlier ones."""
        self._pass += 1
        self._expected.clear()
        self._take_back()
        for number, source in [key for key in self._arrived if key[0] < self._pass]:
            for message in self._arrived.pop((number, source)):
                self._give_back(source, message.slot)

    def finish(self) -> None:
        """Wait for the tensors that this rank sent through the process group."""
        for work, _ in self._by_group.values():
            work.wait()
        self._by_group.clear()

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to the rank at index `to`; do not overwrite it before `finish`."""
        flat = tensor.detach().reshape(-1).contiguous()
        if self._by_group or not self._free:
            self._take_back()
        if self._free and flat.nbytes <= self._slots.shape[-1]:
            slot = self._free.pop()
            self._slot(self._index, slot, flat.nbytes, flat.dtype).copy_(flat)
        else:
            slot = next(self._numbers)
            work = dist.isend(flat.view(torch.uint8), group=self._group, group_dst=to)
            assert work is not None  # this rank is in the group
            self._by_group[slot] = work, flat
        self._write(self._inboxes[to], NOTE.pack(self._pass, self._index, slot, flat.nbytes), to, "send")

    def expect(self, source: int) -> int:
        """Return the number of this pass's next message from the rank at index `source` that is not yet expected."""
        self._expected[source] += 1
        return self._expected[source] - 1

    def receive(self, source: int, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Wait for message `number` (from `expect`) of the rank at index `source`, and take it.

        Raises a `PeerLostError` if the sender has ended, a `TimeoutError` if the message has not arrived in time.
        """
        arrived = self._arrived[self._pass, source]
        while len(arrived) <= number:
            self._read(source)
        slot, nbytes, received = message = arrived[number]
        if nbytes != shape.numel() * dtype.itemsize:
            raise RuntimeError(
                f"{self._me} expected {shape.numel() * dtype.itemsize} bytes of rank {self.ranks[source]}, "
                f"which sent {nbytes}"
            )
        arrived[number] = message._replace(slot=_TAKEN, received=None)
        if received is not None:
            return received.view(dtype).view(shape)
        out = self._slot(source, slot, nbytes, dtype).clone().view(shape)
        self._give_back(source, slot)
        return out

    def _slot(self, owner: int, slot: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self._slots[owner, slot, :nbytes].view(dtype)

    def _take_back(self) -> None:
        while True:
            try:
                returned = os.read(self._returns[self._index], _READ_BYTES)
            except BlockingIOError:
                return
            for (slot,) in _RETURNED.iter_unpack(returned):
                if slot < SLOTS:
                    self._free.append(slot)
                elif slot in self._by_group:  # and not dropped by `finish`
                    self._by_group.pop(slot)[0].wait()  # short: the tensor has arrived

    def _give_back(self, owner: int, slot: int) -> None:
        if slot != _TAKEN:
            self._write(self._returns[owner], _RETURNED.pack(slot), owner, "receive")

    def _write(self, pipe: int, content: bytes, peer: int, operation: str) -> None:
        while True:
            try:
                os.write(pipe, content)
                return
            except BlockingIOError:  # full: its reader is passes behind
                full = select.poll()
                full.register(pipe, select.POLLOUT)
                full.register(self._alive[peer], 0)
                events = dict(full.poll(self._timeout * 1000))
            if not events:
                raise self._too_late(operation, peer)
            if pipe not in events:
                raise self._lost(operation, peer)

    def _read(self, source: int) -> None:
        """Read the available notes, or wait for one from the rank at index `source`."""
        inbox = self._inboxes[self._index]
        try:
            notes = os.read(inbox, _READ_BYTES)
        except BlockingIOError:
            events = dict(self._pollers[source].poll(self._timeout * 1000))
            if not events:
                raise self._too_late("receive", source) from None
            # Messages of a rank that has ended can still be taken.
            if inbox not in events and not poller(inbox, {}).poll(0):
                raise self._lost("receive", source) from None
            return
        for number, sender, slot, nbytes in NOTE.iter_unpack(notes):
            received = None
            if slot >= SLOTS:  # now, since these tensors arrive in the order of the notes
                received = torch.empty(nbytes, dtype=torch.uint8)
                dist.recv(received, group=self._group, group_src=sender)
                self._give_back(sender, slot)
                slot = _TAKEN
            if number < self._pass:
                self._give_back(sender, slot)
            else:
                self._arrived[number, sender].append(_Message(slot, nbytes, received))

    def _lost(self, operation: str, peer: int) -> PeerLostError:
        return PeerLostError(f"rank {self.ranks[peer]} ended while {self._me} was in {operation}")

    def _too_late(self, operation: str, peer: int) -> TimeoutError:
        return TimeoutError(f"{self._me} has waited {self._timeout:g} s in {operation} for rank {self.ranks[peer]}")

    @property
    def _me(self) -> str:
        return f"rank {self.ranks[self._index]}"


def share_mailbox(group: dist.ProcessGroup, nbytes: int, messages: int) -> SharedMailbox | None:
    """Set up a mailbox between the ranks of a gloo group, or return None if impossible. Collective over the group.

    It carries messages of up to `nbytes` (the first rank's value counts), and up to `messages` of a rank in a pass. All
    ranks get None if they are not all on one host, the host has no room for the memory or for that many notes, or one
    has messages of more than `MOST_BYTES`.
    """
    shared = share([group], partial(room_for_mail, nbytes=nbytes, messages=messages))[0]
    return None if shared is None else SharedMailbox(shared, group)


def room_for_mail(size: int, nbytes: int, messages: int) -> Room | None:
    """Return the memory and pipes that `size` ranks need for messages of up to `nbytes`; None if these are too long."""
    if nbytes > MOST_BYTES:
        return None
    names = [f"{kind}-{index}" for kind in ("inbox", "returns") for index in range(size)]
    return Room(size * SLOTS * whole_pages(nbytes), dict.fromkeys(names, b""), unread=2 * messages * NOTE.size)
