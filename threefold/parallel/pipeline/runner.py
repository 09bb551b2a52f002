"""Run of a step's micro-batches: gradient accumulation on one stage, a pipeline schedule on several."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from threefold.comm.heartbeat import Activity, Heartbeat, wait_code
from threefold.config.schedules import Action, StageSchedule
from threefold.doors import hook
from threefold.parallel.arithmetic import RankArithmetic
from threefold.parallel.parallelize import Parallelism, TrainingSettings
from threefold.parallel.pipeline.scheduled_stage import Mailbox, ScheduledStage, SendQueue, TimedAction
from threefold.parallel.pipeline.schedules import (
    actions,
    evaluation_schedule,
    find_activations,
    training_schedule,
)
from threefold.parallel.pipeline.stage import Stage, StepSamples
from threefold.torch_private.pipelining import PipelineSchedule

_TorchPasses = tuple[list[ScheduledStage], PipelineSchedule, PipelineSchedule]
"""Torch's objects for a number of micro-batches: stages and schedule of training, and schedule of evaluation."""


class Runner(ABC):
    """Runner of a replica's micro-batches through the stages of its ranks."""

    has_loss: bool
    """Whether this rank has the last stage, which computes the loss."""

    @abstractmethod
    def arrivals(self, samples: int) -> int | None:
        """Return how often autograd accumulates a gradient into each parameter in a step with this many samples.

        None if this differs among the parameters.
        """

    @abstractmethod
    def forward_backward(self, batch: StepSamples, scale: float) -> Tensor:
        """Run the forward and backward passes of all micro-batches; gradients accumulate in the parameters' leaves.

        Returns the loss of each micro-batch, multiplied by `scale`, if `has_loss`, else a zero (fp32 or fp64 [n]).
        `scale` is the loss scale, divided by the number of valid tokens if a micro-batch's loss is the sum over its
        tokens. All stages of a replica get the same batch.
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

    def __init__(
        self, stage: Stage, settings: TrainingSettings, heartbeat: Heartbeat, arithmetic: RankArithmetic
    ) -> None:
        self.stage, self._settings, self._heartbeat, self._arithmetic = stage, settings, heartbeat, arithmetic

    def arrivals(self, samples: int) -> int:
        return self._settings.parts(samples)

    def forward_backward(self, batch: StepSamples, scale: float) -> Tensor:
        losses = []
        for number, micro in enumerate(batch.split(self.arrivals(batch.size))):
            self._heartbeat.activity(Activity.FORWARD, 0, number)
            loss = micro.through(self.stage) * scale
            self._heartbeat.activity(Activity.BACKWARD, 0, number)
            self._arithmetic.backward_begins(number)
            loss.backward()
            losses.append(loss.detach())
            del loss  # and its graph
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(self, batch: StepSamples) -> Tensor:
        losses = []
        for number, micro in enumerate(batch.split(self.arrivals(batch.size))):
            self._heartbeat.activity(Activity.FORWARD, 0, number)
            losses.append(micro.through(self.stage))
        return torch.stack(losses)


class PipelineRunner(Runner):
    """Several stages, run in the order of a pipeline schedule by `torch.distributed.pipelining`.

    The shape [b, S, H] of a micro-batch's activations between stages is declared (`activation`), or found once per
    batch shape by `prepare`, so that steps exchange no metadata. Torch's objects are made once per number of
    micro-batches, and per batch shape if it is not declared. `add_gradient` adds a deferred gradient to a leaf's.
    Declared activations of the stages before `first_trained` need no gradients.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        parallelism: Parallelism,
        schedule: StageSchedule,
        activation: tuple[int, int, int] | None,
        add_gradient: Callable[[Tensor, Tensor], None],
        first_trained: int = 0,
    ) -> None:
        self._stages, self._placement, self._schedule = stages, parallelism.stages, schedule
        self._mesh, self._deferred, self._arithmetic = parallelism.mesh, parallelism.deferred, parallelism.arithmetic
        self._add_gradient, self._settings = add_gradient, parallelism.settings
        self._declared: Mapping[int, tuple[Tensor, ...]] | None = None
        self._exchange = wait_code("send", self._mesh.pp.number)
        # False if a parameter may get two gradients per micro-batch: a tied weight, from each stage or a deferred one.
        self._one_backward = schedule.one_backward_per_micro_batch
        self.has_loss = any(stage.gives_loss for stage in stages)
        loss_dtype = torch.promote_types(parallelism.settings.dtype, torch.float32)
        self._zero = torch.zeros(1, dtype=loss_dtype, device=self._mesh.device)
        self._micro_batches: list[StepSamples] = []
        # Tensor ranks that share each sequence between stages.
        self._shares = parallelism.mesh.tp.size if parallelism.settings.parallel.sequence_parallel else 1
        self._sends = SendQueue()
        self._mailbox: Mailbox | None = None
        self._log: list[TimedAction] | None = None
        self._found: dict[Hashable, _TorchPasses] = {}
        self.scheduled_stages: list[ScheduledStage] = []
        if activation is not None:
            shape = torch.empty(activation, dtype=parallelism.settings.dtype, device="meta", requires_grad=True)
            numbers = self._placement.held_by(self._mesh.pp.index)
            self._declared = {
                stage: (shape if stage >= first_trained else shape.detach(),)
                for number in numbers
                for stage in (number - 1, number)
            }
            self._use(self._passes(self._settings.micro_batches, (0, activation[1] * self._shares)))

    def arrivals(self, samples: int) -> int | None:
        return self._settings.parts(samples) if self._one_backward else None

    def knows(self, shapes: Hashable) -> bool:
        return self._declared is not None or shapes in self._found

    def prepare(self, batch: StepSamples) -> None:
        count = self._settings.parts(batch.size)
        activations = find_activations(self._stages, self._placement, self._mesh, batch.split(count)[0])
        self._found[batch.shapes] = self._make(activations, count)

    def _use(self, passes: _TorchPasses) -> None:
        self.scheduled_stages, self._train, self._eval = passes

    def _passes(self, count: int, shapes: Any) -> _TorchPasses:
        """Return torch's objects for batches of these shapes, or of this number of micro-batches if it is declared."""
        if self._declared is None:
            return self._found[shapes]
        length = shapes[1]  # [rows, S] of tokens
        if (count, length) not in self._found:
            held = length // self._shares
            cut = {
                stage: (sent.detach()[:, :held].requires_grad_(sent.requires_grad),)
                for stage, (sent,) in self._declared.items()
            }
            self._found[count, length] = self._make(cut, count)
        return self._found[count, length]

    def _make(self, activations: Mapping[int, tuple[Tensor, ...]], count: int) -> _TorchPasses:
        """Make the schedules for the activations that each stage (of this rank, or before one of them) sends on."""
        pp, most = self._mesh.pp, self._settings.micro_batches
        # For training; evaluation uses the process group, whose waits keep stages in step.
        share_mailbox = hook("share_mailbox")
        if self._mailbox is None and pp.shares_memory and share_mailbox is not None:
            nbytes = max(each.nbytes for given in activations.values() for each in given)
            # An activation and a gradient per micro-batch and stage.
            messages = 2 * max(map(len, activations.values())) * most * len(self._stages)
            with pp.waiting("gather"):
                self._mailbox = share_mailbox(pp.group, nbytes, messages)
        later = None if self._deferred is None else self._deferred.take
        sends = self._sends if self._schedule.sends_apart else None
        stages = self._make_stages(activations, later, sends, self._mailbox)
        train = training_schedule(self._schedule, stages, count, _scaled, self._arithmetic.ascends)
        # Separate stages: torch's keep buffers and shapes of the last pass, with or without gradients.
        apart = self._make_stages(activations, None, self._sends, None)
        return stages, train, evaluation_schedule(apart, self._placement, count, _scaled)

    def _make_stages(
        self,
        activations: Mapping[int, tuple[Tensor, ...]],
        later: Callable[[], Callable[[], None]] | None,
        sends: SendQueue | None,
        mailbox: Mailbox | None,
    ) -> list[ScheduledStage]:
        loss = torch.empty_like(self._zero[0], device="meta").requires_grad_()
        number_of_one = torch.empty(1, dtype=torch.int64, device="meta")
        made = []
        for stage, number in zip(self._stages, self._placement.held_by(self._mesh.pp.index), strict=True):
            inputs = activations[number - 1] if number else (number_of_one,)
            shapes = inputs, (loss,) if stage.gives_loss else activations[number]
            place = number, self._placement, self._mesh
            begins = self._arithmetic.backward_begins
            made.append(ScheduledStage(stage, *place, self._micro_batches, shapes, later, sends, mailbox, begins))
        return made

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
        return self._run_micro_batches(lambda *args, **options: self._eval.eval(*args, **options), batch, 1.0)

    def _step(self, *args: Any, **options: Any) -> None:
        for stage in self.scheduled_stages:
            stage.log = self._log
        if self._mailbox is not None:
            self._mailbox.begin()
        self._train.step(*args, **options)
        if self._mailbox is not None:
            self._mailbox.finish()

    def _run_micro_batches(self, run: Callable[..., Any], batch: StepSamples, scale: float) -> Tensor:
        """Run a pass of torch's schedule over the micro-batches; return their losses if `has_loss`, else a zero."""
        count = self._settings.parts(batch.size)
        self._use(self._passes(count, batch.shapes))
        # Torch's schedules split their arguments along dim 0, which samples of any nesting do not allow. So they get
        # the numbers of the micro-batches, and a stage looks up the samples of a number in `_micro_batches`.
        self._micro_batches[:] = batch.split(count)
        numbers = torch.arange(count)
        self._mesh.heartbeat.activity(Activity.PIPELINE)
        losses: list[Tensor] = []
        is_first = any(stage.is_first for stage in self.scheduled_stages)
        try:
            with self._mesh.heartbeat.waiting(self._exchange):  # except while an action runs (`ScheduledStage._timed`)
                run(  # with numbers instead of samples; the last stage computes the loss, so it needs no target
                    *([numbers] if is_first else []),
                    target=numbers if self.has_loss else None,
                    losses=losses,
                    return_outputs=False,
                    loss_kwargs={"scale": scale},
                    number=numbers,
                )
                self._sends.finish()
        finally:
            self._micro_batches.clear()
            self._sends.abandon()  # left over if the step failed
        return torch.stack([loss.detach() for loss in losses]) if self.has_loss else self._zero


def _scaled(loss: Tensor, _number: Tensor, *, scale: float) -> Tensor:
    """Scale the loss, which the last stage has computed already."""
    return loss * scale
