"""Parts of a pipeline's passes: torch's schedules, the shapes of activations, and deferred gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import B, F, I, PipelineScheduleSingle, W, get_schedule_class

from threefold.comm.mesh import Mesh
from threefold.config.schedules import Action, Orders, StageSchedule, TorchSchedule
from threefold.models.custom_batch import inputs_from
from threefold.parallel.pipeline.partition import StageMap
from threefold.parallel.pipeline.scheduled_stage import ScheduledStage
from threefold.parallel.pipeline.stage import Stage, StepSamples
from threefold.torch_private import pipelining

Loss = Callable[..., object]
_KINDS = {"F": F, "B": B, "I": I, "W": W}


class ActionSchedule(pipelining.AnyOrderRuntime):
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
            rank: [pipelining.PipelineAction(action.stage, _KINDS[action.kind], action.micro_batch) for action in order]
            for rank, order in enumerate(orders)
        }
        self.pipeline_order_with_comms = pipelining.add_send_recv(
            computed, self.stage_index_to_group_rank.__getitem__, len(ranks)
        )


def training_schedule(
    schedule: StageSchedule, stages: Sequence[ScheduledStage], micro_batches: int, loss: Loss, ascending: bool = False
) -> pipelining.PipelineSchedule:
    """Make torch's object for a schedule; `ascending`: a stage's backward passes go in the order of micro-batches."""
    pp = stages[0].group_size
    if ascending and schedule.name == "looped-bfs" and isinstance(schedule, TorchSchedule):  # its own run backwards
        count = len(stages)
        last, orders = micro_batches - 1, orders_of_all_ranks(schedule, pp, count, micro_batches)
        turned = [
            [each if each.kind == "F" else each._replace(micro_batch=last - each.micro_batch) for each in order]
            for order in orders
        ]
        return ActionSchedule(stages, schedule.stage_ranks(pp, count), turned, micro_batches, loss)
    if (given := schedule.orders(pp, micro_batches)) is not None:
        return ActionSchedule(stages, schedule.stage_ranks(pp, len(stages)), given, micro_batches, loss)
    kind: Any = _torch_class(schedule)
    if issubclass(kind, PipelineScheduleSingle):
        kind = pipelining.Schedule1F1BOfAnyCount if schedule.name == "1f1b" else kind
        return kind(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    return kind(list(stages), micro_batches, loss_fn=loss, scale_grads=False)


def evaluation_schedule(
    stages: Sequence[ScheduledStage], placement: StageMap, micro_batches: int, loss: Loss
) -> pipelining.PipelineSchedule:
    """Make a schedule of forward passes for evaluation: all micro-batches through each of a rank's stages in turn.

    The order of a training schedule has gaps for backward passes, and torch's own evaluation fails if neighbouring
    stages share a rank.
    """
    orders = [
        [Action(stage, "F", number) for stage in placement.held_by(rank) for number in range(micro_batches)]
        for rank in range(1 + max(placement.ranks))
    ]
    return ActionSchedule(stages, placement.ranks, orders, micro_batches, loss)


def actions(schedule: pipelining.PipelineSchedule, rank: int | None = None) -> list[Action]:
    """Return the actions of a rank (by default of this one) in a training schedule, in order."""
    planned = pipelining.planned_actions(schedule, rank)
    return [Action(each.stage_index, each.computation_type.value, each.microbatch_index or 0) for each in planned]


def orders_of_all_ranks(schedule: TorchSchedule, pp: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """Return the actions of each rank in a training schedule of several stages per rank, without starting ranks."""
    kind: Any = _torch_class(schedule)
    lone = pipelining.lone_schedule(kind, list(schedule.stage_ranks(pp, stages_per_rank)), micro_batches)
    return tuple(tuple(actions(lone, rank)) for rank in range(pp))


def _torch_class(schedule: StageSchedule) -> type[pipelining.PipelineSchedule]:
    assert isinstance(schedule, TorchSchedule)  # the others are lists of actions
    return get_schedule_class(schedule.torch_class.removeprefix("Schedule"))


def find_activations(
    stages: Sequence[Stage], placement: StageMap, mesh: Mesh, micro_batch: StepSamples
) -> dict[int, tuple[Tensor, ...]]:
    """Find the activations of this rank's stages, and of the stages before them, by a forward pass.

    The micro-batch, real samples since layers may depend on their values, passes through all stages but the last.
    The activations, by the number of their stage, are on the meta device. Collective over the pipeline, and over all
    that the layers communicate with.
    """
    found: dict[int, tuple[Tensor, ...]] = {}
    last: tuple[Tensor, ...] = ()
    rank = mesh.pp.index
    for number, stage in zip(placement.held_by(rank), stages, strict=True):
        received = None
        if number:
            source = placement.ranks[number - 1]
            received = last if source == rank else receive_activations(mesh, source)
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
            send_activations(mesh, receiver, last)
    return found


def _on_meta(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(each.shape, dtype=each.dtype, device="meta", requires_grad=each.requires_grad) for each in tensors
    )


def send_activations(mesh: Mesh, to: int, tensors: Sequence[Tensor]) -> None:
    """Send activations with their shapes to a rank of the pipeline, which calls `receive_activations`."""
    shapes = [(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors]
    with mesh.pp.waiting("send"):
        dist.send_object_list([shapes], mesh.pp.ranks[to], mesh.pp.group, mesh.device)
    for tensor in tensors:
        mesh.pp.send(tensor.detach(), to)


def receive_activations(mesh: Mesh, source: int) -> tuple[Tensor, ...]:
    """Receive the activations that a rank of the pipeline sends, of any number, shapes and dtypes."""
    arrived: list[Any] = [None]
    with mesh.pp.waiting("receive"):
        dist.recv_object_list(arrived, mesh.pp.ranks[source], mesh.pp.group, mesh.device)
    received = []
    for shape, dtype, needs_gradient in arrived[0]:
        tensor = mesh.pp.receive_(torch.empty(shape, dtype=dtype, device=mesh.device), source)
        received.append(tensor.requires_grad_(needs_gradient))
    return tuple(received)


Watch = Callable[[Tensor], Callable[[Tensor], None]]
"""Function called with a leaf when its gradient is deferred; returns a function to call with the computed gradient."""


_Entry = tuple[Tensor, Callable[[], Tensor]]
"""Leaf, and the function that computes one of its gradients."""


class DeferredGradients:
    """Store of deferred weight gradients; `is_open` while backward passes defer to it, within `collecting`."""

    def __init__(self) -> None:
        self.is_open = False
        self._entries: list[_Entry] = []
        self._outstanding = 0
        self._add: Callable[[Tensor, Tensor], None] | None = None
        self._watch: Watch | None = None

    def defer(self, leaf: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Add `gradient()` to the gradient of `leaf` later."""
        see = None if self._watch is None else self._watch(leaf)

        def computed() -> Tensor:
            found = gradient()
            if see is not None:
                see(found)
            return found

        self._entries.append((leaf, computed))

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        """Call `watch` for the gradients that are deferred within the block."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def take(self) -> Callable[[], None]:
        """Return a function that computes the gradients deferred since the last call: one micro-batch on one stage."""
        entries, self._entries = self._entries, []
        self._outstanding += 1
        return partial(self._compute, entries)

    @contextmanager
    def collecting(self, add: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
        """Defer the weight gradients of one step's backward passes; `add` accumulates each in its leaf's gradient."""
        self.is_open, self._add = True, add
        try:
            yield
        finally:
            self.is_open = False
        if self._entries or self._outstanding:
            raise RuntimeError("the schedule ended before all weight gradients were computed")

    def _compute(self, entries: list[_Entry]) -> None:
        self._outstanding -= 1
        self._add_all(entries)

    @torch.no_grad()
    def _add_all(self, entries: list[_Entry]) -> None:
        assert self._add is not None  # set before anything was deferred
        while entries:  # each frees its activations when it is done
            leaf, gradient = entries.pop(0)
            self._add(leaf, gradient())
