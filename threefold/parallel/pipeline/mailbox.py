"""What ranks of one host send each other, through memory that they share: for CPU tensors, without sockets.

A rank copies what it sends into a free slot of its own and puts a note into the receiver's inbox, a pipe, which wakes
that one if it sleeps. The receiver copies it out when it needs it, and gives the slot back through another pipe, which
wakes nobody. A tensor for which there is no slot goes through the process group; the note has a number from `SLOTS` on
in place of a slot, which comes back in the same way, and until then the tensor is kept.

A sender never waits for a receiver: pipes have room for the notes of two passes, and none is ahead of another rank by
more. So no rank waits for one that waits for it, in whatever order the ranks of a pipeline send and receive, and
whatever else they wait for in between: with fewer slots than what is under way, a rank that waits for a slot could wait
for one that waits for it in a collective. Pipes order the accesses to memory around them, as in `comm.turnstile`.
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

from threefold.comm.segments import PeerLostError, Room, Shared, close_all, poller, share, whole_pages

SLOTS: Final = 8
"""Of each rank. Of a pipeline's messages, those that are sent and not needed yet: about two for each micro-batch in
flight between two stages."""
MOST_BYTES: Final = 4 << 20
"""Of a slot. Longer messages have longer computations beside them, gloo takes them as fast, and a host's shared memory
may be small."""

_NOTE = struct.Struct("<IHHQ")  # number of the pass, index of the sender, slot, bytes
_RETURNED = struct.Struct("<H")  # slot
_TAKEN = 0xFFFF
_READ_BYTES = 4096


class _Message(NamedTuple):
    """What has arrived: in a slot of its sender's, or received through the process group."""

    slot: int
    nbytes: int
    received: Tensor | None


class Mailbox:
    """Sends and receives between the ranks of a process group that are on one host.

    Messages from one rank to another are numbered in the order in which they are sent, and anew in each pass. All ranks
    begin as many passes as the others, and send and receive the same messages in each; what is left of a pass that
    failed is dropped.

    Args:
        shared: memory with `SLOTS` slots of each rank, and pipes: the inboxes of all ranks, and what they get back.
        group: of the same ranks.

    Attributes:
        ranks: global ranks, by their index in the group.
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

    @classmethod
    def try_create(cls, group: dist.ProcessGroup, nbytes: int, messages: int) -> "Mailbox | None":
        """Set one up between the ranks of `group`; a collective call, with the same answer on every rank.

        Args:
            group: a gloo process group.
            nbytes: of a message; those of up to so many as the first rank says go through memory.
            messages: that a rank sends or receives in a pass, at most.

        Returns None when the ranks are not all on one host, when it has no room for the memory or for so many messages,
        or when one of them has messages of more than `MOST_BYTES`.
        """
        shared = share([group], partial(room_for_mail, nbytes=nbytes, messages=messages))[0]
        return None if shared is None else cls(shared, group)

    def close(self) -> None:
        """Close the pipes and free the memory. Peers that wait for this rank then raise `PeerLostError`."""
        self._closed()
        self._arrived.clear()
        self._slots = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        """A pass begins."""
        self._pass += 1
        self._expected.clear()
        self._take_back()
        for number, source in [key for key in self._arrived if key[0] < self._pass]:
            for message in self._arrived.pop((number, source)):
                self._give_back(source, message.slot)

    def finish(self) -> None:
        """Wait for what this rank sent through the process group."""
        for work, _ in self._by_group.values():
            work.wait()
        self._by_group.clear()

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to the rank at index `to`; it must not be overwritten before `finish`."""
        flat = tensor.detach().reshape(-1).contiguous()
        if self._by_group or not self._free:
            self._take_back()
        if self._free and flat.nbytes <= self._slots.shape[-1]:
            slot = self._free.pop()
            self._slot(self._index, slot, flat.nbytes, flat.dtype).copy_(flat)
        else:
            slot = next(self._numbers)
            work = dist.isend(flat.view(torch.uint8), group=self._group, group_dst=to)
            assert work is not None  # this rank is one of the group
            self._by_group[slot] = work, flat
        self._write(self._inboxes[to], _NOTE.pack(self._pass, self._index, slot, flat.nbytes), to, "send")

    def expect(self, source: int) -> int:
        """The number of the next message from the rank at index `source` that nobody has expected in this pass."""
        self._expected[source] += 1
        return self._expected[source] - 1

    def receive(self, source: int, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Wait for a message, and take it.

        Args:
            source: index of its sender.
            number: of `expect`.
            shape, dtype: of what was sent.

        Raises:
            PeerLostError: its sender has ended.
            TimeoutError: it has not come.
            RuntimeError: it has another length.
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

    # -- implementation --------------------------------------------------------------------------------------------

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
                    self._by_group.pop(slot)[0].wait()  # not for long, as it has arrived

    def _give_back(self, owner: int, slot: int) -> None:
        if slot != _TAKEN:
            self._write(self._returns[owner], _RETURNED.pack(slot), owner, "receive")

    def _write(self, pipe: int, content: bytes, peer: int, operation: str) -> None:
        """Write into a pipe that the rank at index `peer` reads."""
        while True:
            try:
                os.write(pipe, content)
                return
            except BlockingIOError:  # full, as its reader is passes behind
                self._wait_for_room(pipe, peer, operation)

    def _wait_for_room(self, pipe: int, peer: int, operation: str) -> None:
        full = select.poll()
        full.register(pipe, select.POLLOUT)
        full.register(self._alive[peer], 0)
        events = dict(full.poll(self._timeout * 1000))
        if not events:
            raise self._too_late(operation, peer)
        if pipe not in events:
            raise self._lost(operation, peer)

    def _read(self, source: int) -> None:
        """Read what notes there are, or wait for one of the rank at index `source`."""
        inbox = self._inboxes[self._index]
        try:
            notes = os.read(inbox, _READ_BYTES)
        except BlockingIOError:
            return self._sleep(source, inbox)
        for number, sender, slot, nbytes in _NOTE.iter_unpack(notes):
            received = None
            if slot >= SLOTS:  # now, since these arrive in the order of the notes
                received = torch.empty(nbytes, dtype=torch.uint8)
                dist.recv(received, group=self._group, group_src=sender)
                self._give_back(sender, slot)
                slot = _TAKEN
            if number < self._pass:
                self._give_back(sender, slot)
            else:
                self._arrived[number, sender].append(_Message(slot, nbytes, received))

    def _sleep(self, source: int, inbox: int) -> None:
        events = dict(self._pollers[source].poll(self._timeout * 1000))
        if not events:
            raise self._too_late("receive", source)
        # What a rank has sent may be taken after its end.
        if inbox not in events and not poller(inbox, {}).poll(0):
            raise self._lost("receive", source)

    def _lost(self, operation: str, peer: int) -> PeerLostError:
        return PeerLostError(f"rank {self.ranks[peer]} ended while {self._me} was in {operation}")

    def _too_late(self, operation: str, peer: int) -> TimeoutError:
        return TimeoutError(f"{self._me} has waited {self._timeout:g} s in {operation} for rank {self.ranks[peer]}")

    @property
    def _me(self) -> str:
        return f"rank {self.ranks[self._index]}"


def room_for_mail(size: int, nbytes: int, messages: int) -> Room | None:
    """What `size` ranks need for so many messages a pass of up to `nbytes`; None where these are too long."""
    if nbytes > MOST_BYTES:
        return None
    names = [f"{kind}-{index}" for kind in ("inbox", "returns") for index in range(size)]
    return Room(size * SLOTS * whole_pages(nbytes), dict.fromkeys(names, b""), unread=2 * messages * _NOTE.size)
