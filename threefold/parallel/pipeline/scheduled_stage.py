"""A pipeline stage as torch's schedules run it: its receive buffers, what it sends, and when it computes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from threefold.comm.heartbeat import Activity, wait_code
from threefold.comm.mesh import Mesh
from threefold.config.schedule_actions import Action
from threefold.errors import UserError
from threefold.parallel.pipeline.mailbox import Mailbox
from threefold.parallel.pipeline.micro_batches import StepSamples
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.sends import SendQueue
from threefold.parallel.pipeline.stage import Stage
from threefold.torch_private.pipelining import BufferedPipelineStage, RecvInfo

_ACTIVITIES = {
    "F": Activity.FORWARD,
    "B": Activity.BACKWARD,
    "I": Activity.INPUT_GRADIENTS,
    "W": Activity.WEIGHT_GRADIENTS,
}

DeferredWeights = Callable[[], Callable[[], None]]


class TimedAction(NamedTuple):
    """When an action ran: seconds of `time.perf_counter`, on this rank."""

    action: Action
    start: float
    end: float


class _StageOfMicroBatches(nn.Module):
    """A stage as torch's schedules call it: with the number of a micro-batch, whose samples it knows.

    Args:
        stage: the layers.
        micro_batches: those of the pass that runs.
        is_first: whether it receives nothing.
    """

    def __init__(self, stage: Stage, micro_batches: Sequence[StepSamples], is_first: bool) -> None:
        super().__init__()
        self.stage, self.micro_batches, self.is_first = stage, micro_batches, is_first

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        return self.micro_batches[int(number)].through(self.stage, None if self.is_first else received)


class StageShapes(NamedTuple):
    """Shapes of what a stage receives and gives, on the meta device: known before, so that no metadata is exchanged.

    Attributes:
        inputs: the first stage's is the number of the micro-batch.
        outputs: the last stage's is the loss.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class ScheduledStage(BufferedPipelineStage):
    """One stage of a rank, as a `PipelineStage` of torch.

    In addition to torch's class, it has receive buffers for the micro-batches in flight only, counts its sends in the
    mesh's recorder, refuses activations of another shape than declared, and can log when it computed. Activations are
    one tensor or several; those without gradients, such as masks, get none.

    Args:
        stage: the layers.
        number: its index in the pipeline.
        stages: which ranks hold the other stages.
        mesh: of this rank.
        micro_batches: a list that holds those of the pass that runs.
        shapes: of what the stage receives and gives.
        deferred: called after each backward pass; returns the function that computes its deferred weight gradients.
        sends: starts what the stage sends; None where torch's schedule does, together with receives.
        mailbox: of the ranks of the stages, which has all they send and receive; None for their process group.
    """

    def __init__(
        self,
        stage: Stage,
        number: int,
        stages: StageMap,
        mesh: Mesh,
        micro_batches: Sequence[StepSamples],
        shapes: StageShapes,
        deferred: DeferredWeights | None = None,
        sends: SendQueue | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        super().__init__(
            _StageOfMicroBatches(stage, micro_batches, number == 0),
            number,
            len(stages.ranks),
            mesh.device,
            input_args=shapes.inputs,
            output_args=shapes.outputs,
            group=mesh.pp.group,
            dw_builder=deferred,
        )
        self.log: list[TimedAction] | None = None
        self._recorder, self._declared, self._sends, self._mailbox = mesh.recorder, shapes, sends, mailbox
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
            _drop(self.args_recv_info[fwd_chunk_id])
            if self.is_last or self.is_on_this_rank(self.stage_index + 1):
                del self.fwd_cache[fwd_chunk_id]  # else it is still to be sent
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
            else:
                self._skip_backward(bwd_chunk_id, full_backward)
        if loss is not None:
            loss.detach_()  # torch's schedules keep it to the end of the step, and its graph the receive buffer
        _drop(self.args_recv_info[bwd_chunk_id])
        _drop(self.grad_recv_info[bwd_chunk_id])

    def _skip_backward(self, micro_batch: int, full_backward: bool) -> None:
        """In place of a backward pass through outputs of which none has a gradient."""
        del self.fwd_cache[micro_batch]
        self.bwd_cache[micro_batch] = (None,) * len(self.args_recv_info[micro_batch])
        if not full_backward and self.dw_builder is not None:
            self.dw_runner[micro_batch] = self.dw_builder()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        infos = self.grad_recv_info[mb_index]
        # What the next stage did not use has a gradient of zero, which torch would leave out.
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
        if self._expects(self.args_recv_info[fwd_chunk_id]):
            return []
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        if self._expects(self.grad_recv_info[bwd_chunk_id]):
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
            # Gloo sends the memory of a dense tensor in its order there, whatever its strides.
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
        given, declared = (out,) if isinstance(out, Tensor) else tuple(out), self._declared.outputs
        if len(given) != len(declared):
            raise ValueError(
                f"stage {self.stage_index} gave {len(given)} tensors of activations, but {len(declared)} were declared"
            )
        for place, (tensor, known) in enumerate(zip(given, declared, strict=True)):
            which = "activations" if len(declared) == 1 else f"activations {place}"
            if (tensor.shape, tensor.dtype) != (known.shape, known.dtype):
                raise ValueError(
                    f"stage {self.stage_index} gave {which} {list(tensor.shape)} of {tensor.dtype}, "
                    f"but {list(known.shape)} of {known.dtype} were declared"
                )
            if self.has_backward and tensor.requires_grad and not known.requires_grad:
                raise ValueError(
                    f"stage {self.stage_index} gave {which} {list(tensor.shape)} of {tensor.dtype} that need a "
                    "gradient, but were declared without one"
                )

    def _expects(self, infos: tuple[RecvInfo, ...]) -> bool:
        """Have what a micro-batch receives come by the mailbox; returns False, with buffers made, if there is none."""
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                if self._mailbox is None:
                    info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)
                else:
                    self._expected[info] = self._mailbox.expect(self._rank_of(info))
        return self._mailbox is not None

    def _take(self, infos: tuple[RecvInfo, ...]) -> None:
        """Wait for what is to come by the mailbox, as late as can be."""
        for info in infos:
            number = self._expected.pop(info, None)
            if self._mailbox is not None and number is not None and info.tensor_meta is not None:
                shape, dtype = info.tensor_meta.shape, info.tensor_meta.dtype
                info.buffer = self._mailbox.receive(self._rank_of(info), number, shape, dtype)

    def _rank_of(self, info: RecvInfo) -> int:
        """The index of the sender on the pp axis."""
        assert info.source is not None  # a tensor that comes has a sender
        rank: int = self.stage_index_to_group_rank[info.source]
        return rank

    @contextmanager
    def _timed(self, kind: str, micro_batch: int) -> Iterator[None]:
        self._heartbeat.activity(_ACTIVITIES[kind], self.stage_index, micro_batch)
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


def _drop(infos: tuple[RecvInfo, ...]) -> None:
    """Free a micro-batch's buffers."""
    for info in infos:
        info.buffer = None
