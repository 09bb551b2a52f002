"""Private parts of `torch.distributed.pipelining`: why each is used, and what would replace it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.pipelining.schedules as _schedules
import torch.distributed.pipelining.stage as _stage
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe

PipelineSchedule = _schedules._PipelineSchedule
"""Base class of all schedules, whose `step` and `eval` are documented. Why: the type of either kind of schedule. A
public name of it would replace it."""

PipelineScheduleRuntime = _schedules._PipelineScheduleRuntime
"""The schedule that runs any list of actions with sends and receives among them. Why: schedules of CSV files, and
evaluation, whose order is none of a training schedule's. A public constructor from actions would replace it."""

PipelineAction = _schedules._Action
"""An action of such a list: stage, kind, micro-batch, actions inside. Why: to write lists of them, and to read those of
torch's schedules. It would be public with the above."""

add_send_recv = _schedules._add_send_recv
"""Puts sends and receives between actions of computation, in an order in which no rank waits forever. Why: the runtime
leaves that to its subclasses. It would be part of a constructor from a list of actions."""

RecvInfo = _stage._RecvInfo
"""A receive buffer of a stage: `buffer`, and `is_root_arg` for the model's own inputs. Why: buffers are made when a
micro-batch arrives and dropped after its backward pass, so that memory does not grow with the number of micro-batches.
Torch allocating them like that itself would replace it."""


class AnyOrderRuntime(PipelineScheduleRuntime):
    """The runtime, with a last stage that takes the micro-batches in any order.

    Why: torch keeps their losses as they are computed, and looks them up by the number of the micro-batch, so that a
    backward pass would start from another micro-batch's loss. Losses kept by their number would replace it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._computed: list[int] = []

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        super()._maybe_compute_loss(stage, output, target_mbs, mb_index, loss_kwargs)
        if stage.is_last:
            self._computed.append(mb_index)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        return super()._maybe_get_loss(stage, self._computed.index(mb_index)) if stage.is_last else None

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        super()._update_losses(stages, losses)
        if losses:
            losses[:] = [losses[self._computed.index(number)] for number in range(len(losses))]
        self._computed.clear()


class BufferedPipelineStage(PipelineStage):
    """A stage without receive buffers of its own: `args_recv_info` and `grad_recv_info` have none until one is set.

    Why: torch makes those of all micro-batches of a step at once, in `_setup_forward_recv_info` and
    `_setup_backward_recv_info`, and the memory of hundreds of micro-batches is more than a rank has. Here they are made
    on the meta device, and dropped. Buffers that are made when a receive is posted would replace it.
    """

    def is_on_this_rank(self, stage: int) -> bool:
        """Whether this rank holds `stage` too."""
        return bool(self._is_same_rank(stage))

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._drop_buffers(self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._without_memory():
            super()._setup_backward_recv_info(num_microbatches)
        self._drop_buffers(self.grad_recv_info)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _drop_buffers(self, infos: Mapping[int, tuple[RecvInfo, ...]]) -> None:
        for of_micro_batch in infos.values():
            for info in of_micro_batch:
                info.buffer = None


class Schedule1F1BOfAnyCount(Schedule1F1B):
    """1F1B that also takes fewer micro-batches than stages.

    Why: its algorithm is right for them (the warm-up is cut to the micro-batches there are); only the check in its
    constructor refuses, so the constructor of its base class is called instead. Dropping the check would replace it.
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: object) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)  # type: ignore[arg-type]


def planned_actions(schedule: PipelineSchedule, rank: int | None = None) -> list[PipelineAction]:
    """What a training schedule has a rank compute, in order; this rank, unless another one's is asked for and known.

    Why: to show and to check what runs. A public accessor of a schedule's order would replace it.
    """
    if isinstance(schedule, PipelineScheduleRuntime):
        return [
            each
            for action in schedule.pipeline_order_with_comms[schedule.rank if rank is None else rank]
            for each in (action.sub_actions or () if action.computation_type == _schedules.OVERLAP_F_B else (action,))
            if each.is_compute_op
        ]
    assert isinstance(schedule, PipelineScheduleSingle)
    stage, count = schedule._stage.stage_index, schedule._n_microbatches
    ahead = count if isinstance(schedule, ScheduleGPipe) else min(count, schedule._num_stages - stage)
    order = [PipelineAction(stage, _schedules.F, number) for number in range(ahead)]
    for number in range(count):
        order.append(PipelineAction(stage, _schedules.B, number))
        if ahead + number < count:
            order.append(PipelineAction(stage, _schedules.F, ahead + number))
    return order


def lone_schedule(kind: type[PipelineScheduleRuntime], ranks: list[int], micro_batches: int) -> PipelineScheduleRuntime:
    """A schedule of several stages a rank that has the actions of all ranks and can run none.

    Why: a plan needs the actions of torch's schedules without their ranks, and without `_prepare_schedule_with_comms`,
    which takes minutes for many micro-batches. Functions that give the actions alone would replace it.

    Args:
        kind: torch's class.
        ranks: of each stage.
        micro_batches: of a step.
    """

    class Lone(kind):  # type: ignore[misc,valid-type]
        def _prepare_schedule_with_comms(self, actions: dict[int, list[Any]], *args: Any, **options: Any) -> None:
            self.pipeline_order_with_comms = {
                rank: [action for action in order if action is not None] for rank, order in actions.items()
            }

    count, size = len(ranks), 1 + max(ranks)
    stages = [  # as much of them as the constructor looks at
        SimpleNamespace(submod=None, stage_index=stage, num_stages=count, group_rank=0, group_size=size, is_last=False)
        for stage, rank in enumerate(ranks)
        if rank == 0
    ]
    return Lone(stages, micro_batches, loss_fn=lambda *_: None, scale_grads=False)
