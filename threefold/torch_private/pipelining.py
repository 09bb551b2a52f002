"""Private parts of `torch.distributed.pipelining`, each with the reason why, and with what would replace it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.pipelining.schedules as _schedules
import torch.distributed.pipelining.stage as _stage
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe

PipelineSchedule = _schedules._PipelineSchedule
"""Base class of all schedules; its `step` and `eval` are documented. Why: the common type of both kinds of schedules. A
public name would replace it."""

PipelineScheduleRuntime = _schedules._PipelineScheduleRuntime
"""Schedule that runs any list of actions, with sends and receives among them. Why: schedules in CSV files, and
evaluation, whose order no training schedule has. A public constructor from actions would replace it."""

PipelineAction = _schedules._Action
"""Action of such a list: stage, kind, micro-batch, and nested actions. Why: to write such lists, and to read those of
torch's schedules. It would become public with the runtime."""

add_send_recv = _schedules._add_send_recv
"""Insert sends and receives between actions of computation, in an order without deadlocks. Why: the runtime leaves this
to its subclasses. It would become part of a constructor from a list of actions."""

RecvInfo = _stage._RecvInfo
"""Receive buffer of a stage: `buffer`, and `is_root_arg` for the model's own inputs. Why: buffers are created when a
micro-batch arrives and dropped after its backward pass, so that memory does not grow with the number of micro-batches.
The same allocation in torch would replace it."""


class AnyOrderRuntime(PipelineScheduleRuntime):
    """Runtime whose last stage takes the micro-batches in any order.

    Why: torch lists losses in the order in which they are computed, but looks them up by the number of the micro-batch,
    so that a backward pass would start from another micro-batch's loss. Losses kept by number would replace it.
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
    """Stage without its own receive buffers: `args_recv_info` and `grad_recv_info` have none until one is set.

    Why: torch creates the buffers of all micro-batches of a step at once, in `_setup_forward_recv_info` and
    `_setup_backward_recv_info`; for hundreds of micro-batches, these exceed the memory of a rank. Here they are created
    on the meta device, and dropped. Buffers created when a receive is posted would replace it.
    """

    def is_on_this_rank(self, stage: int) -> bool:
        """Return whether this rank also holds `stage`."""
        return bool(self._is_same_rank(stage))

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)
        for info in chain.from_iterable(self.args_recv_info.values()):
            info.buffer = None

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._without_memory():
            super()._setup_backward_recv_info(num_microbatches)
        for info in chain.from_iterable(self.grad_recv_info.values()):
            info.buffer = None

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


class Schedule1F1BOfAnyCount(Schedule1F1B):
    """1F1B that also takes fewer micro-batches than stages.

    Why: torch's algorithm handles them (the warm-up is cut to the available micro-batches), but its constructor refuses
    them; the constructor of the base class is called instead. Dropping the check would replace it.
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: object) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)  # type: ignore[arg-type]


def planned_actions(schedule: PipelineSchedule, rank: int | None = None) -> list[PipelineAction]:
    """Return a training schedule's computations on a rank, in order; by default, on this rank.

    Why: to show and check what runs. A public accessor of a schedule's order would replace it.
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
    """Create a schedule of torch's class `kind`, with stages on `ranks`, that has all ranks' actions but cannot run.

    Why: planning needs the actions of torch's schedules without their ranks, and without
    `_prepare_schedule_with_comms`, which takes minutes for many micro-batches. Functions that return only the actions
    would replace it.
    """

    class Lone(kind):  # type: ignore[misc,valid-type]
        def _prepare_schedule_with_comms(self, actions: dict[int, list[Any]], *args: Any, **options: Any) -> None:
            self.pipeline_order_with_comms = {
                rank: [action for action in order if action is not None] for rank, order in actions.items()
            }

    count, size = len(ranks), 1 + max(ranks)
    stages = [  # only the attributes that the constructor reads
        SimpleNamespace(submod=None, stage_index=stage, num_stages=count, group_rank=0, group_size=size, is_last=False)
        for stage, rank in enumerate(ranks)
        if rank == 0
    ]
    return Lone(stages, micro_batches, loss_fn=lambda *_: None, scale_grads=False)
