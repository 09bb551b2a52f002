"""Stages as `torch.distributed.pipelining` runs them, with sends that overlap and are freed within the step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from threefold.comm.heartbeat import Activity, wait_code
from threefold.comm.mesh import Mesh
from threefold.config.schedules import SENDS_UNDER_WAY, Action
from threefold.errors import UserError
from threefold.parallel.pipeline.partition import StageMap
from threefold.parallel.pipeline.stage import Stage, StepSamples
from threefold.torch_private.pipelining import BufferedPipelineStage, RecvInfo


class Mailbox(Protocol):
    """Sends and receives between ranks of one host, from an attached room (hook `share_mailbox`).

    Messages from one rank to another are numbered in the order of their sends, anew in each pass. All ranks run the
    same number of passes, with matching sends and receives; remaining messages of a failed pass are dropped.
    """

    def begin(self) -> None:
        """Begin a pass, and drop messages of earlier ones."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to the rank at index `to`; do not overwrite it before `finish`."""

    def expect(self, source: int) -> int:
        """Return the number of this pass's next message from the rank at index `source` that is not yet expected."""

    def receive(self, source: int, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Wait for message `number` (from `expect`) of the rank at index `source`, and take it."""

    def finish(self) -> None:
        """Wait until the tensors that this rank sent may be overwritten."""


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
        backward_begins: called with the micro-batch of each backward pass, or of each part of one.
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
        backward_begins: Callable[[int], None] = lambda _: None,
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
        self._backward_begins = backward_begins
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
        if kind != "F":
            self._backward_begins(micro_batch)
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
