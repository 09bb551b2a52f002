"""Stages and schedules of `torch.distributed.pipelining`, with sends that overlap and are freed within the step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import B, F, I, PipelineScheduleSingle, W, get_schedule_class

from threefold.comm.heartbeat import Activity, wait_code
from threefold.comm.mesh import Mesh
from threefold.config.schedules import SENDS_UNDER_WAY, Action, Orders, OwnSchedule, Schedule, TorchSchedule
from threefold.errors import UserError
from threefold.models.own_batch import inputs_from
from threefold.parallel.pipeline.mailbox import Mailbox
from threefold.parallel.pipeline.micro_batches import StepSamples
from threefold.parallel.pipeline.partition import StageMap
from threefold.parallel.pipeline.stage import Stage
from threefold.torch_private.pipelining import (
    AnyOrderRuntime,
    BufferedPipelineStage,
    PipelineAction,
    PipelineSchedule,
    RecvInfo,
    Schedule1F1BOfAnyCount,
    add_send_recv,
    lone_schedule,
    planned_actions,
)


class SendQueue:
    """Sends of a rank's stages, in the order of its schedule.

    Torch's runtime for lists of actions keeps every sent tensor to the end of the step, one per micro-batch. Here, the
    fifth send waits for the first. That cannot deadlock: in torch's order, each receive directly follows its send over
    all ranks, so that even waiting for every send on the spot would end.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[dist.Work | None, Tensor]] = deque()

    def start(self, ops: Iterable[dist.P2POp]) -> None:
        """Start sends, and wait for the oldest if many are under way."""
        for op in ops:
            work = dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
            self._under_way.append((work, op.tensor))
        self._wait(SENDS_UNDER_WAY)

    def finish(self) -> None:
        """Wait for all sends."""
        self._wait(0)

    def abandon(self) -> None:
        """Forget the sends of a step that failed."""
        self._under_way.clear()

    def _wait(self, rest: int) -> None:
        while len(self._under_way) > rest:
            work, _ = self._under_way.popleft()
            if work is not None:
                work.wait()


class TensorShape(NamedTuple):
    """Shape, dtype and `requires_grad` of a tensor, which its receiver must know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorShape":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def on(self, device: torch.device | str) -> Tensor:
        """Return an empty tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


def find_activations(
    stages: Sequence[Stage], placement: StageMap, mesh: Mesh, micro_batch: StepSamples
) -> dict[int, tuple[Tensor, ...]]:
    """Find the activations of this rank's stages, and of the stages before them, by a forward pass.

    The micro-batch, real samples since layers may depend on their values, passes through all stages but the last.
    Collective over the pipeline, and over all that the layers communicate with.

    Returns:
        number of a stage → its activations, on the meta device.
    """
    found: dict[int, tuple[Tensor, ...]] = {}
    last: tuple[Tensor, ...] = ()
    rank = mesh.pp.index
    for number, stage in zip(placement.held_by(rank), stages, strict=True):
        received = None
        if number:
            source = placement.ranks[number - 1]
            received = last if source == rank else _receive(mesh, source)
            found[number - 1] = _on_meta(received)
        if stage.gives_loss:
            break
        with torch.enable_grad():
            outputs = inputs_from(micro_batch.through(stage, received), stage.layer_names[-1]).args
        found[number] = _on_meta(outputs)
        # Detached from this stage's graph, as the next stage gets them.
        last = tuple(each.detach().requires_grad_(each.requires_grad) for each in outputs)
        receiver = placement.ranks[number + 1]
        if receiver != rank:
            _send(mesh, receiver, last)
    return found


def _on_meta(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(TensorShape.of(each).on("meta") for each in tensors)


def _send(mesh: Mesh, to: int, tensors: Sequence[Tensor]) -> None:
    shapes = [tuple(TensorShape.of(each)) for each in tensors]
    with mesh.pp.waiting("send"):
        dist.send_object_list([shapes], mesh.pp.ranks[to], mesh.pp.group, mesh.device)
    for tensor in tensors:
        mesh.pp.send(tensor.detach(), to)


def _receive(mesh: Mesh, source: int) -> tuple[Tensor, ...]:
    arrived: list[Any] = [None]
    with mesh.pp.waiting("receive"):
        dist.recv_object_list(arrived, mesh.pp.ranks[source], mesh.pp.group, mesh.device)
    received = []
    for shape in arrived[0]:
        described = TensorShape(*shape)
        tensor = mesh.pp.receive_(described._replace(requires_grad=False).on(mesh.device), source)
        received.append(tensor.requires_grad_(described.requires_grad))
    return tuple(received)


_ACTIVITIES = {
    "F": Activity.FORWARD,
    "B": Activity.BACKWARD,
    "I": Activity.INPUT_GRADIENTS,
    "W": Activity.WEIGHT_GRADIENTS,
}

DeferredWeights = Callable[[], Callable[[], None]]


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


class StageShapes(NamedTuple):
    """Shapes of a stage's inputs and outputs on the meta device, declared so that no metadata is exchanged.

    Attributes:
        inputs: activations received; on the first stage the number of the micro-batch.
        outputs: activations sent; on the last stage the loss.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class ScheduledStage(BufferedPipelineStage):
    """One stage of a rank, as a `PipelineStage` of torch.

    Beyond torch's class, it has receive buffers for the micro-batches in flight only, counts its sends in the mesh's
    recorder, refuses activations of an undeclared shape, and can log when it computes. Activations are one tensor or
    several; those without gradients, such as masks, get none.

    Args:
        micro_batches: list that holds the micro-batches of the current pass.
        deferred: called after each backward pass; returns the function that computes its deferred weight gradients.
        sends: queue of the stage's sends; None if torch's schedule sends, together with receives.
        mailbox: carries all sends and receives between the stages' ranks; None for their process group.
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
            else:
                self._skip_backward(bwd_chunk_id, full_backward)
        if loss is not None:
            loss.detach_()  # torch keeps it to the end of the step, and its graph keeps the receive buffer
        _drop(self.args_recv_info[bwd_chunk_id])
        _drop(self.grad_recv_info[bwd_chunk_id])

    def _skip_backward(self, micro_batch: int, full_backward: bool) -> None:
        """Skip a backward pass through outputs without gradients."""
        del self.fwd_cache[micro_batch]
        self.bwd_cache[micro_batch] = (None,) * len(self.args_recv_info[micro_batch])
        if not full_backward and self.dw_builder is not None:
            self.dw_runner[micro_batch] = self.dw_builder()

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
    for info in infos:
        info.buffer = None


Loss = Callable[..., object]
_KINDS = {"F": F, "B": B, "I": I, "W": W}


class ActionSchedule(AnyOrderRuntime):
    """Schedule given as a list of actions per rank (`orders`), with stages on any ranks (`ranks`, by stage)."""

    def __init__(
        self,
        stages: Sequence[ScheduledStage],
        ranks: Sequence[int],
        orders: Sequence[Sequence[Action]],
        micro_batches: int,
        loss: Loss,
    ) -> None:
        super().__init__(list(stages), micro_batches, loss_fn=loss, scale_grads=False)
        self.stage_index_to_group_rank = dict(enumerate(ranks))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        computed = {
            rank: [PipelineAction(action.stage, _KINDS[action.kind], action.micro_batch) for action in order]
            for rank, order in enumerate(orders)
        }
        self.pipeline_order_with_comms = add_send_recv(computed, self.stage_index_to_group_rank.__getitem__, len(ranks))


def training_schedule(
    schedule: Schedule, stages: Sequence[ScheduledStage], micro_batches: int, loss: Loss
) -> PipelineSchedule:
    """Make torch's object for a schedule of the config."""
    if isinstance(schedule, OwnSchedule):
        pp = stages[0].group_size
        ranks, orders = schedule.stage_ranks(pp, len(stages)), schedule.orders(pp, micro_batches)
        return ActionSchedule(stages, ranks, orders, micro_batches, loss)
    kind: Any = _torch_class(schedule)
    if issubclass(kind, PipelineScheduleSingle):
        kind = Schedule1F1BOfAnyCount if schedule.name == "1f1b" else kind
        return kind(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    return kind(list(stages), micro_batches, loss_fn=loss, scale_grads=False)


def evaluation_schedule(
    stages: Sequence[ScheduledStage], placement: StageMap, micro_batches: int, loss: Loss
) -> PipelineSchedule:
    """Make a schedule of forward passes for evaluation: all micro-batches through each of a rank's stages in turn.

    The order of a training schedule has gaps for backward passes, and torch's own evaluation fails if neighbouring
    stages share a rank.
    """
    orders = [
        [Action(stage, "F", number) for stage in placement.held_by(rank) for number in range(micro_batches)]
        for rank in range(1 + max(placement.ranks))
    ]
    return ActionSchedule(stages, placement.ranks, orders, micro_batches, loss)


def actions(schedule: PipelineSchedule) -> list[Action]:
    """Return the actions of this rank in a training schedule, in order."""
    return _as_actions(planned_actions(schedule))


def orders_of_all_ranks(schedule: TorchSchedule, pp: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """Return the actions of each rank in a training schedule of several stages per rank, without starting ranks."""
    kind: Any = _torch_class(schedule)
    lone = lone_schedule(kind, list(schedule.stage_ranks(pp, stages_per_rank)), micro_batches)
    return tuple(tuple(_as_actions(planned_actions(lone, rank))) for rank in range(pp))


def _torch_class(schedule: Schedule) -> type[PipelineSchedule]:
    assert isinstance(schedule, TorchSchedule)  # the others are lists of actions
    return get_schedule_class(schedule.torch_class.removeprefix("Schedule"))


def _as_actions(planned: Iterable[PipelineAction]) -> list[Action]:
    return [Action(each.stage_index, each.computation_type.value, each.microbatch_index or 0) for each in planned]
