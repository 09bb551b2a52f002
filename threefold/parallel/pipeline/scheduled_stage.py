"""Stages as `torch.distributed.pipelining` runs them, with sends that overlap and are freed within the step.

Between ranks of one host, a `Mailbox` carries CPU tensors through shared memory, without sockets. A sender copies a
tensor into a free slot of its own and writes a note into the receiver's inbox, a pipe, which wakes the receiver if it
sleeps. The receiver copies the tensor out when it needs it, and returns the slot through another pipe, which wakes
nobody. If no slot is free, the tensor goes through the process group. Its note then has a number of at least `SLOTS`
instead of a slot. The number is returned in the same way, and the sender keeps the tensor until then.

A sender never waits for a slot: it could wait for a rank that waits for it in a collective. It waits only if a pipe is
full. Pipes have room for the notes of two passes, and no rank is more than two passes ahead of another, so ranks cannot
deadlock, in whatever order they send, receive and wait for something else. Pipes order the accesses to memory around
them, as those of `Barrier` (comm/shared_memory.py) do.
"""

import os
import select
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from threefold.comm.heartbeat import wait_code
from threefold.comm.mesh import Mesh
from threefold.comm.rank_state import Activity
from threefold.comm.segments import PeerLostError, Shared, close_all, poller
from threefold.config.schedules import SENDS_UNDER_WAY, Action
from threefold.errors import UserError
from threefold.parallel.gradient_sums import LeafOrder
from threefold.parallel.pipeline.partition import StageMap
from threefold.parallel.pipeline.stage import Stage, StepSamples
from threefold.torch_private.pipelining import BufferedPipelineStage, RecvInfo

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


class Mailbox:
    """Sends and receives between the ranks of a process group on one host.

    Messages from one rank to another are numbered in the order of their sends, anew in each pass. All ranks run the
    same number of passes, with matching sends and receives; remaining messages of a failed pass are dropped. `shared`
    has `SLOTS` slots of memory per rank, and pipes: inboxes of all ranks, then pipes that return slots.
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


class SendQueue:
    """Sends of a rank's stages, in the order of its schedule.

    Torch's runtime for lists of actions keeps every sent tensor to the end of the step, one per micro-batch. Here, the
    fifth send waits for the first. That cannot deadlock: in torch's order, each receive directly follows its send over
    all ranks, so even waiting for every send at once would terminate.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[dist.Work | None, Tensor]] = deque()

    def start(self, ops: Iterable[dist.P2POp]) -> None:
        """Start sends, and wait for the oldest if many are in flight."""
        for op in ops:
            work = dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
            self._under_way.append((work, op.tensor))
        self.finish(SENDS_UNDER_WAY)

    def finish(self, rest: int = 0) -> None:
        """Wait for all sends but `rest`."""
        while len(self._under_way) > rest:
            work, _ = self._under_way.popleft()
            if work is not None:
                work.wait()

    def abandon(self) -> None:
        """Forget the sends of a step that failed."""
        self._under_way.clear()


_ACTIVITIES = {
    "F": Activity.FORWARD,
    "B": Activity.BACKWARD,
    "I": Activity.INPUT_GRADIENTS,
    "W": Activity.WEIGHT_GRADIENTS,
}


class TimedAction(NamedTuple):
    """Start and end of an action on this rank, in seconds of `time.perf_counter`."""

    action: Action
    start: float
    end: float


class _StageOfMicroBatches(nn.Module):
    """A stage as torch's schedules call it: with the number of a micro-batch instead of its samples."""

    def __init__(self, stage: Stage, micro_batches: Sequence[StepSamples], is_first: bool) -> None:
        super().__init__()
        self.stage, self.micro_batches, self.is_first = stage, micro_batches, is_first

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        return self.micro_batches[int(number)].through(self.stage, None if self.is_first else received)


class ScheduledStage(BufferedPipelineStage):
    """One stage of a rank, as a `PipelineStage` of torch.

    Beyond torch's class, it has receive buffers for the micro-batches in flight only, counts its sends in the mesh's
    recorder, refuses activations of an undeclared shape, and can log when it computes. Activations are one tensor or
    several; those without gradients, such as masks, get none.

    Args:
        micro_batches: list that holds the micro-batches of the current pass.
        shapes: inputs (on the first stage the number of the micro-batch) and outputs (on the last stage the loss) on
            the meta device, declared so that no metadata is exchanged.
        deferred: called after each backward pass; returns the function that computes its deferred weight gradients.
        sends: queue of the stage's sends; None if torch's schedule sends, together with receives.
        mailbox: carries all sends and receives between the stages' ranks; None for their process group.
        order: order of an exact run's sums over samples, which gets the micro-batch that runs; None for any other run.
    """

    def __init__(
        self,
        stage: Stage,
        number: int,
        stages: StageMap,
        mesh: Mesh,
        micro_batches: Sequence[StepSamples],
        shapes: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
        deferred: Callable[[], Callable[[], None]] | None = None,
        sends: SendQueue | None = None,
        mailbox: Mailbox | None = None,
        order: LeafOrder | None = None,
    ) -> None:
        inputs, outputs = shapes
        super().__init__(
            _StageOfMicroBatches(stage, micro_batches, number == 0),
            number,
            len(stages.ranks),
            mesh.device,
            input_args=inputs,
            output_args=outputs,
            group=mesh.pp.group,
            dw_builder=deferred,
        )
        self.log: list[TimedAction] | None = None
        self._order = order
        self._recorder, self._declared, self._sends, self._mailbox = mesh.recorder, outputs, sends, mailbox
        self._expected: dict[RecvInfo, int] = {}
        self._heartbeat, self._exchange = mesh.heartbeat, wait_code("send", mesh.pp.number)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._take(self.args_recv_info[fwd_chunk_id])
        with self._timed("F", fwd_chunk_id):
            try:
                out = super().forward_one_chunk(fwd_chunk_id, *args, **options)
            except RuntimeError as error:  # torch's, with the tensors of the call
                if isinstance(error.__cause__, UserError):
                    raise error.__cause__ from None
                raise
        if not self.is_last:
            self._check(out)
        if not self.has_backward:
            _drop_buffers(*self.args_recv_info[fwd_chunk_id])
            if self.is_last or self.is_on_this_rank(self.stage_index + 1):
                del self.fwd_cache[fwd_chunk_id]  # otherwise it is still to be sent
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        self._take(self.grad_recv_info[bwd_chunk_id])
        with self._timed("B" if full_backward else "I", bwd_chunk_id):
            if self.is_last or any(each.requires_grad for each in self.fwd_cache[bwd_chunk_id][0]):
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            else:  # through outputs without gradients
                del self.fwd_cache[bwd_chunk_id]
                self.bwd_cache[bwd_chunk_id] = (None,) * len(self.args_recv_info[bwd_chunk_id])
                if not full_backward and self.dw_builder is not None:
                    self.dw_runner[bwd_chunk_id] = self.dw_builder()
        if loss is not None:
            loss.detach_()  # torch keeps it to the end of the step, and its graph keeps the receive buffer
        _drop_buffers(*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id])

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        infos = self.grad_recv_info[mb_index]
        # Torch would leave out outputs that the next stage did not use; their gradient is zero.
        grads = tuple(
            torch.zeros(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)
            if grad is None and info.tensor_meta is not None
            else grad
            for grad, info in zip(next_stage_bwd_outputs, infos, strict=True)
        )
        super().set_local_bwd_input(grads, mb_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        with self._timed("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self._expects(self.args_recv_info[fwd_chunk_id]) else super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last or self._expects(self.grad_recv_info[bwd_chunk_id]):
            return []
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._sent(super().get_fwd_send_ops(fwd_chunk_id))
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent(super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            # Gloo sends the memory of a dense tensor in storage order, whatever its strides.
            op.tensor = op.tensor.contiguous()
            self._recorder.add("pp", "send", op.tensor)
        if self._mailbox is not None:
            for op in ops:
                self._mailbox.send(op.tensor, op.group_peer)
            return []
        if self._sends is None:
            return ops
        self._sends.start(ops)
        return []

    def _check(self, out: Tensor | Sequence[Tensor]) -> None:
        given, declared = (out,) if isinstance(out, Tensor) else tuple(out), self._declared
        if len(given) != len(declared):
            raise ValueError(
                f"stage {self.stage_index} gave {len(given)} tensors of activations, but {len(declared)} were declared"
            )
        for place, (tensor, known) in enumerate(zip(given, declared, strict=True)):
            differs = (tensor.shape, tensor.dtype) != (known.shape, known.dtype)
            if not differs and (known.requires_grad or not tensor.requires_grad or not self.has_backward):
                continue
            which = "activations" if len(declared) == 1 else f"activations {place}"
            gave = f"stage {self.stage_index} gave {which} {list(tensor.shape)} of {tensor.dtype}"
            if differs:
                raise ValueError(f"{gave}, but {list(known.shape)} of {known.dtype} were declared")
            raise ValueError(f"{gave} that need a gradient, but were declared without one")

    def _expects(self, infos: tuple[RecvInfo, ...]) -> bool:
        """Reserve a micro-batch's inputs in the mailbox; without one, allocate buffers and return False."""
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                if self._mailbox is None:
                    info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)
                else:
                    self._expected[info] = self._mailbox.expect(self._rank_of(info))
        return self._mailbox is not None

    def _take(self, infos: tuple[RecvInfo, ...]) -> None:
        """Wait for a micro-batch's inputs in the mailbox, as late as possible."""
        for info in infos:
            number = self._expected.pop(info, None)
            if self._mailbox is not None and number is not None and info.tensor_meta is not None:
                shape, dtype = info.tensor_meta.shape, info.tensor_meta.dtype
                info.buffer = self._mailbox.receive(self._rank_of(info), number, shape, dtype)

    def _rank_of(self, info: RecvInfo) -> int:
        assert info.source is not None  # a received tensor has a sender
        rank: int = self.stage_index_to_group_rank[info.source]
        return rank

    @contextmanager
    def _timed(self, kind: str, micro_batch: int) -> Iterator[None]:
        self._heartbeat.activity(_ACTIVITIES[kind], self.stage_index, micro_batch)
        if self._order is not None and kind != "F":
            self._order.running = micro_batch
        start = 0.0 if self.log is None else self._now()
        yield
        if self.log is not None:
            self.log.append(TimedAction(Action(self.stage_index, kind, micro_batch), start, self._now()))
        # Until the next action, torch's schedule sends and receives.
        self._heartbeat.activity(Activity.PIPELINE)
        self._heartbeat.wait(self._exchange)

    def _now(self) -> float:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


def _drop_buffers(*infos: RecvInfo) -> None:
    for info in infos:
        info.buffer = None
