"""The schedules of `torch.distributed.pipelining`, by the names they have in a config."""

from collections.abc import Callable, Sequence

from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    F,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    _Action,
    _add_send_recv,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)

from threefold.parallel.pipeline.pipe import Action, Pipe
from threefold.parallel.pipeline.placement import StageMap

SPLITTING = ("zero-bubble", "zbv", "dualpipev")
"""Schedules that put the gradients of weights off."""


class _Schedule1F1BAnyCount(Schedule1F1B):
    """1F1B that also takes fewer micro-batches than stages.

    Its algorithm is right for them (the warm-up is cut to the micro-batches there are); only the check in its
    constructor refuses.
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: object) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)  # type: ignore[arg-type]


_ONE_STAGE: dict[str, type[PipelineScheduleSingle]] = {"1f1b": _Schedule1F1BAnyCount, "gpipe": ScheduleGPipe}
_SEVERAL_STAGES: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class _ForwardOnly(_PipelineScheduleRuntime):
    """All micro-batches through one of the rank's stages after the other, without a backward pass.

    The order of a training schedule has pauses for backward passes in it, and torch's own evaluation fails where
    neighbouring stages share a rank.
    """

    def __init__(
        self, pipes: list[PipelineStage], stages: StageMap, micro_batches: int, loss: Callable[..., object]
    ) -> None:
        super().__init__(pipes, micro_batches, loss_fn=loss, scale_grads=False)
        self.stage_index_to_group_rank = dict(enumerate(stages.ranks))
        for pipe in pipes:
            pipe.stage_index_to_group_rank = self.stage_index_to_group_rank
        order = {
            rank: [_Action(stage, F, number) for stage in stages.held_by(rank) for number in range(micro_batches)]
            for rank in range(self.pp_group_size)
        }
        self.pipeline_order_with_comms = _add_send_recv(order, stages.ranks.__getitem__, self._num_stages)


def training_schedule(
    name: str, pipes: Sequence[Pipe], micro_batches: int, loss: Callable[..., object]
) -> _PipelineSchedule:
    """The schedule called `name` in a config, for this rank's stages; `loss` as torch's schedules call it."""
    if name in _ONE_STAGE:
        return _ONE_STAGE[name](pipes[0], micro_batches, loss_fn=loss, scale_grads=False)
    return _SEVERAL_STAGES[name](list(pipes), micro_batches, loss_fn=loss, scale_grads=False)


def evaluation_schedule(
    pipes: Sequence[Pipe], stages: StageMap, micro_batches: int, loss: Callable[..., object]
) -> _PipelineSchedule:
    """A schedule of forward passes alone."""
    return _ForwardOnly(list(pipes), stages, micro_batches, loss)


def actions(schedule: _PipelineSchedule) -> list[Action]:
    """What a training schedule has this rank compute, in order."""
    if isinstance(schedule, _PipelineScheduleRuntime):
        planned = [
            each
            for action in schedule.pipeline_order_with_comms[schedule.rank]
            for each in (action.sub_actions or () if action.computation_type == OVERLAP_F_B else (action,))
            if each.is_compute_op
        ]
        return [Action(each.stage_index, each.computation_type.value, each.microbatch_index or 0) for each in planned]
    assert isinstance(schedule, PipelineScheduleSingle)
    stage, count = schedule._stage.stage_index, schedule._n_microbatches
    ahead = count if isinstance(schedule, ScheduleGPipe) else min(count, schedule._num_stages - stage)
    order = [Action(stage, "F", number) for number in range(ahead)]
    for number in range(count):
        order.append(Action(stage, "B", number))
        if ahead + number < count:
            order.append(Action(stage, "F", ahead + number))
    return order
