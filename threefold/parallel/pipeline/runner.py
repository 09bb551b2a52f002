"""Run of a step's micro-batches: gradient accumulation on one stage, a pipeline schedule on several."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from threefold.comm.heartbeat import Heartbeat
from threefold.comm.rank_state import Activity
from threefold.config.schedules import Action, Schedule
from threefold.parallel.gradients import LeafOrder
from threefold.parallel.parallelize import Parallelism
from threefold.parallel.pipeline.scheduled_stage import ScheduledStage, SendQueue, TimedAction
from threefold.parallel.pipeline.schedules import PassMaker, ScheduledPasses, actions
from threefold.parallel.pipeline.stage import Stage, StepSamples


class Runner(ABC):
    """Runner of a replica's micro-batches through the stages of its ranks.

    Attributes:
        has_loss: whether this rank has the last stage, which computes the loss.
        arrivals: how often autograd accumulates a gradient into each parameter in a step; None if this differs among
            them.
    """

    has_loss: bool
    arrivals: int | None

    @abstractmethod
    def forward_backward(self, batch: StepSamples, scale: float) -> Tensor:
        """Run the forward and backward passes of all micro-batches; gradients accumulate in the parameters' leaves.

        Args:
            batch: samples of the replica, the same on all its stages.
            scale: factor of each loss: the loss scale, divided by the number of valid tokens if a micro-batch's loss is
                the sum over its tokens.

        Returns:
            the scaled loss of each micro-batch if `has_loss`, else a zero (fp32 or fp64 [n]).
        """

    def knows(self, shapes: Hashable) -> bool:
        """Return whether samples of these shapes can run; otherwise `prepare` must be called with such samples."""
        return True

    def prepare(self, batch: StepSamples) -> None:  # noqa: B027
        """Find the shapes of the activations that a batch makes. Collective over the ranks of the stages."""

    @abstractmethod
    def evaluate(self, batch: StepSamples) -> Tensor:
        """Return the loss of each micro-batch, without gradients, if `has_loss`; else a zero ([n])."""


class LoopRunner(Runner):
    """Gradient accumulation over micro-batches in a loop, on one stage."""

    has_loss = True

    def __init__(self, stage: Stage, micro_batches: int, heartbeat: Heartbeat, order: LeafOrder | None = None) -> None:
        self.stage, self.micro_batches, self.arrivals = stage, micro_batches, micro_batches
        self._heartbeat, self._order = heartbeat, order

    def forward_backward(self, batch: StepSamples, scale: float) -> Tensor:
        losses = []
        for number, micro in enumerate(batch.split(self.micro_batches)):
            self._heartbeat.activity(Activity.FORWARD, 0, number)
            loss = micro.through(self.stage) * scale
            self._heartbeat.activity(Activity.BACKWARD, 0, number)
            if self._order is not None:
                self._order.running = number
            loss.backward()
            losses.append(loss.detach())
            del loss  # and its graph
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(self, batch: StepSamples) -> Tensor:
        losses = []
        for number, micro in enumerate(batch.split(self.micro_batches)):
            self._heartbeat.activity(Activity.FORWARD, 0, number)
            losses.append(micro.through(self.stage))
        return torch.stack(losses)


class PipelineRunner(Runner):
    """Several stages, run in the order of a pipeline schedule by `torch.distributed.pipelining`.

    The shape of the activations is declared, or found once per batch shape, so that steps exchange no metadata.

    Args:
        activation: shape [b, S, H] of a micro-batch's activations between stages; None if `prepare` finds the shapes.
        add_gradient: adds a deferred gradient to that of a leaf.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        parallelism: Parallelism,
        schedule: Schedule,
        micro_batches: int,
        activation: tuple[int, int, int] | None,
        add_gradient: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._mesh, self._deferred, self._add_gradient = parallelism.mesh, parallelism.deferred, add_gradient
        self.has_loss = any(stage.gives_loss for stage in stages)
        # With several stages on a rank, a tied weight may get a gradient from each, or a deferred one.
        self.arrivals = micro_batches if schedule.one_backward_per_micro_batch else None
        loss_dtype = torch.promote_types(parallelism.dtype, torch.float32)
        self._zero = torch.zeros(1, dtype=loss_dtype, device=self._mesh.device)
        # Torch's schedules split their arguments along dim 0, which samples of any nesting do not allow. So they get
        # the numbers of the micro-batches, and a stage looks up the samples of a number in `_micro_batches`.
        self._numbers = torch.arange(micro_batches)
        self._micro_batches: list[StepSamples] = []
        self._sends = SendQueue()
        self._log: list[TimedAction] | None = None
        self._maker = PassMaker(
            stages,
            parallelism.stages,
            self._mesh,
            schedule,
            self._numbers,
            self._micro_batches,
            self._zero[0],
            self._sends,
            None if self._deferred is None else self._deferred.take,
            parallelism.order,
        )
        self._found: dict[Hashable, ScheduledPasses] = {}
        self._declared = activation is not None
        self.scheduled_stages: list[ScheduledStage] = []
        if activation is not None:
            shape = torch.empty(activation, dtype=parallelism.dtype, device="meta", requires_grad=True)
            self._use(self._maker.of_declared(shape))

    def knows(self, shapes: Hashable) -> bool:
        return self._declared or shapes in self._found

    def prepare(self, batch: StepSamples) -> None:
        self._found[batch.shapes] = self._maker.of_samples(batch.split(len(self._numbers))[0])

    def _use(self, passes: ScheduledPasses) -> None:
        self.scheduled_stages, self._train, self._eval = passes

    def actions(self) -> list[Action]:
        """Return the actions of this rank in a step, in order."""
        return actions(self._train)

    @contextmanager
    def timing(self) -> Iterator[list[TimedAction]]:
        """Log when each action of the block's steps ran; on a GPU this synchronizes after every action."""
        log: list[TimedAction] = []
        self._log = log
        try:
            yield log
        finally:
            self._log = None

    def forward_backward(self, batch: StepSamples, scale: float) -> Tensor:
        with nullcontext() if self._deferred is None else self._deferred.collecting(self._add_gradient):
            return self._run_micro_batches(self._step, batch, scale)

    @torch.no_grad()
    def evaluate(self, batch: StepSamples) -> Tensor:
        return self._run_micro_batches(self._evaluate, batch, 1.0)

    def _step(self, *args: Any, **options: Any) -> None:
        for stage in self.scheduled_stages:
            stage.log = self._log
        mailbox = self._maker.mailbox
        if mailbox is not None:
            mailbox.begin()
        self._train.step(*args, **options)
        if mailbox is not None:
            mailbox.finish()

    def _evaluate(self, *args: Any, **options: Any) -> None:
        self._eval.eval(*args, **options)

    def _run_micro_batches(self, run: Callable[..., Any], batch: StepSamples, scale: float) -> Tensor:
        """Run a pass of torch's schedule over the micro-batches; return their losses if `has_loss`, else a zero."""
        if not self._declared:
            self._use(self._found[batch.shapes])
        self._micro_batches[:] = batch.split(len(self._numbers))
        self._mesh.heartbeat.activity(Activity.PIPELINE)
        losses: list[Tensor] = []
        is_first = any(stage.is_first for stage in self.scheduled_stages)
        try:
            with self._mesh.pp.waiting("send"):  # except while an action runs
                run(  # with numbers instead of samples; the last stage computes the loss, so it needs no target
                    *([self._numbers] if is_first else []),
                    target=self._numbers if self.has_loss else None,
                    losses=losses,
                    return_outputs=False,
                    loss_kwargs={"scale": scale},
                    number=self._numbers,
                )
                self._sends.finish()
        finally:
            self._micro_batches.clear()
            self._sends.abandon()  # left over if the step failed
        return torch.stack([loss.detach() for loss in losses]) if self.has_loss else self._zero
