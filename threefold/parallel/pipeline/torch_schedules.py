"""Pipeline schedules as objects of `torch.distributed.pipelining`: torch's own classes, and lists of actions."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import B, F, I, PipelineScheduleSingle, W, get_schedule_class

from threefold.config.schedule_actions import Action, Orders
from threefold.config.schedules import FileSchedule, Schedule, TorchSchedule
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.scheduled_stage import ScheduledStage
from threefold.torch_private.pipelining import (
    AnyOrderRuntime,
    PipelineAction,
    PipelineSchedule,
    Schedule1F1BOfAnyCount,
    add_send_recv,
    lone_schedule,
    planned_actions,
)

Loss = Callable[..., object]
_KINDS = {"F": F, "B": B, "I": I, "W": W}


class ActionSchedule(AnyOrderRuntime):
    """A schedule given as a list of actions per rank, with stages on any ranks.

    Args:
        stages: of this rank.
        ranks: the coordinate on the pp axis of each stage of the pipeline.
        orders: for each pipeline rank its actions.
        micro_batches: how many a step has.
        loss: as torch's schedules call it.
    """

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
    """Torch's object for a schedule of the config.

    Args:
        schedule: the row or the file.
        stages: of this rank.
        micro_batches: how many a step has.
        loss: as torch's schedules call it.
    """
    if isinstance(schedule, FileSchedule):
        return ActionSchedule(stages, schedule.stage_ranks(0, 0), schedule.orders, micro_batches, loss)
    kind: Any = _torch_class(schedule)
    if issubclass(kind, PipelineScheduleSingle):
        kind = Schedule1F1BOfAnyCount if schedule.name == "1f1b" else kind
        return kind(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    return kind(list(stages), micro_batches, loss_fn=loss, scale_grads=False)


def evaluation_schedule(
    stages: Sequence[ScheduledStage], placement: StageMap, micro_batches: int, loss: Loss
) -> PipelineSchedule:
    """Forward passes for evaluation: all micro-batches through each of a rank's stages in turn.

    The order of a training schedule has gaps for backward passes, and torch's own evaluation fails where
    neighbouring stages share a rank.
    """
    orders = [
        [Action(stage, "F", number) for stage in placement.held_by(rank) for number in range(micro_batches)]
        for rank in range(1 + max(placement.ranks))
    ]
    return ActionSchedule(stages, placement.ranks, orders, micro_batches, loss)


def actions(schedule: PipelineSchedule) -> list[Action]:
    """The actions of this rank in a training schedule, in order."""
    return _as_actions(planned_actions(schedule))


def orders_of_all_ranks(schedule: TorchSchedule, pp: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """The actions of each rank in a training schedule of several stages a rank, without any rank.

    Args:
        schedule: the row.
        pp: pipeline ranks.
        stages_per_rank: as in `parallel.stage_chunks`.
        micro_batches: how many a step has; a number that the schedule accepts.
    """
    kind: Any = _torch_class(schedule)
    lone = lone_schedule(kind, list(schedule.stage_ranks(pp, stages_per_rank)), micro_batches)
    return tuple(tuple(_as_actions(planned_actions(lone, rank))) for rank in range(pp))


def _torch_class(schedule: Schedule) -> type[PipelineSchedule]:
    assert isinstance(schedule, TorchSchedule)  # the others are lists of actions
    return get_schedule_class(schedule.torch_class.removeprefix("Schedule"))


def _as_actions(planned: Iterable[PipelineAction]) -> list[Action]:
    return [Action(each.stage_index, each.computation_type.value, each.microbatch_index or 0) for each in planned]
