"""Runs the micro-batches of a step: gradient accumulation on one stage, a pipeline schedule on several."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.config.schedule_actions import Action
from threefold.config.schedules import Schedule
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.parallel.parallelism import Parallelism
from threefold.parallel.pipeline.deferred import DeferredGradients
from threefold.parallel.pipeline.scheduled_stage import ScheduledStage, Shapes, TimedAction
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.pipeline.torch_schedules import actions, evaluation_schedule, training_schedule


@dataclass(frozen=True)
class LocalBatch:
    """The samples of one step on a rank: its replica's, each restricted to the rank's positions.

    Attributes:
        tokens, labels: int64 [B, S], this rank's positions of each sequence.
        samples: dropout keys and documents.
    """

    tokens: Tensor
    labels: Tensor
    samples: SampleInfo = NOTHING

    def split(self, parts: int) -> list["LocalBatch"]:
        """The batch divided into micro-batches of equal size.

        Raises:
            ValueError: the samples do not divide by `parts`.
        """
        if len(self.tokens) % parts:
            raise ValueError(f"{len(self.tokens)} samples do not divide into {parts} micro-batches")
        facts = [[None] * parts if fact is None else fact.chunk(parts) for fact in self.samples]
        samples = [SampleInfo(*each) for each in zip(*facts, strict=True)]
        micro_batches = zip(self.tokens.chunk(parts), self.labels.chunk(parts), samples, strict=True)
        return [LocalBatch(*each) for each in micro_batches]


class Runner(ABC):
    """Runs a replica's micro-batches through the stages of its ranks.

    Attributes:
        has_loss: whether this rank has the last stage, which computes the loss.
        arrivals: how many gradients autograd accumulates into each parameter in a step; None where parameters differ.
    """

    has_loss: bool
    arrivals: int | None

    @abstractmethod
    def forward_backward(self, batch: LocalBatch, scale: float) -> Tensor:
        """Forward and backward passes of all micro-batches; gradients are accumulated in the parameters' leaves.

        Args:
            batch: the replica's samples, the same on all its stages.
            scale: what each summed loss is multiplied by (the loss scale over the number of tokens with labels).

        Returns:
            the scaled loss of all micro-batches together where `has_loss`, zero elsewhere (fp32 or fp64 scalar).
        """

    @abstractmethod
    def evaluate(self, batch: LocalBatch) -> Tensor:
        """The summed loss of all micro-batches, without gradients, where `has_loss`; zero elsewhere."""


class LoopRunner(Runner):
    """One stage: gradient accumulation over micro-batches in a loop.

    Args:
        stage: the whole model (or this tensor rank's part of it).
        micro_batches: how many the samples are split into.
    """

    has_loss = True

    def __init__(self, stage: Stage, micro_batches: int) -> None:
        self.stage, self.micro_batches, self.arrivals = stage, micro_batches, micro_batches

    def forward_backward(self, batch: LocalBatch, scale: float) -> Tensor:
        losses = []
        for micro in batch.split(self.micro_batches):
            loss = self.stage(micro.tokens, micro.labels, micro.samples) * scale
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, batch: LocalBatch) -> Tensor:
        losses = [self.stage(micro.tokens, micro.labels, micro.samples) for micro in batch.split(self.micro_batches)]
        return torch.stack(losses).sum()


class PipelineRunner(Runner):
    """Several stages, run in the order of a pipeline schedule by `torch.distributed.pipelining`.

    The shape of the activations is declared, so that stages never exchange metadata.

    Args:
        stages: this rank's, in the pipeline's order.
        parallelism: which ranks hold the other stages.
        schedule: of the config.
        micro_batches: how many the samples are split into.
        activation: shape [b, S, H] of one micro-batch's activations between stages.
        add_gradient: adds a deferred gradient to that of a leaf.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        parallelism: Parallelism,
        schedule: Schedule,
        micro_batches: int,
        activation: tuple[int, int, int],
        add_gradient: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._stages, self._parallelism = stages, parallelism
        self.has_loss = any(stage.gives_loss for stage in stages)
        # With several stages on a rank, a tied weight may get a gradient from each, or one that was deferred.
        self.arrivals = micro_batches if schedule.one_backward_per_micro_batch else None
        loss_dtype = torch.promote_types(parallelism.dtype, torch.float32)
        self._zero = torch.zeros((), dtype=loss_dtype, device=parallelism.mesh.device)
        self._shapes = Shapes(
            torch.empty(activation[:2], dtype=torch.int64, device="meta"),
            torch.empty(activation, dtype=parallelism.dtype, device="meta", requires_grad=True),
            torch.empty((), dtype=loss_dtype, device="meta", requires_grad=True),
        )
        self._deferred, self._add_gradient = parallelism.deferred, add_gradient
        self.scheduled_stages = self._make_stages(self._deferred)
        self._train = training_schedule(schedule, self.scheduled_stages, micro_batches, _scaled)
        # Stages of its own: torch's keep buffers and shapes of the last pass, with or without gradients.
        self._eval = evaluation_schedule(self._make_stages(), parallelism.stages, micro_batches, _scaled)

    def _make_stages(self, deferred: DeferredGradients | None = None) -> list[ScheduledStage]:
        mesh, placement = self._parallelism.mesh, self._parallelism.stages
        later = None if deferred is None else deferred.take
        numbers = placement.held_by(mesh.pp.index)
        return [
            ScheduledStage(stage, number, placement, mesh, self._shapes, later)
            for stage, number in zip(self._stages, numbers, strict=True)
        ]

    def actions(self) -> list[Action]:
        """The actions of this rank in a step, in order."""
        return actions(self._train)

    @contextmanager
    def timing(self) -> Iterator[list[TimedAction]]:
        """Log when each action of the block's steps ran; on a GPU this synchronizes after every action."""
        log: list[TimedAction] = []
        for stage in self.scheduled_stages:
            stage.log = log
        try:
            yield log
        finally:
            for stage in self.scheduled_stages:
                stage.log = None

    def forward_backward(self, batch: LocalBatch, scale: float) -> Tensor:
        with nullcontext() if self._deferred is None else self._deferred.collecting(self._add_gradient):
            return self._loss(self._train.step, batch, scale)

    @torch.no_grad()
    def evaluate(self, batch: LocalBatch) -> Tensor:
        return self._loss(self._eval.eval, batch, 1.0)

    def _loss(self, run: Callable[..., Any], batch: LocalBatch, scale: float) -> Tensor:
        losses: list[Tensor] = []
        has_tokens = any(stage.is_first for stage in self.scheduled_stages)
        run(
            *([batch.tokens] if has_tokens else []),
            target=batch.labels if self.has_loss else None,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"scale": scale},
            labels=batch.labels,
            **{name: fact for name, fact in batch.samples._asdict().items() if fact is not None},
        )
        return torch.stack([loss.detach() for loss in losses]).sum() if self.has_loss else self._zero


def _scaled(loss: Tensor, _labels: Tensor, *, scale: float) -> Tensor:
    """The last stage has computed the summed loss already; its labels came as a keyword."""
    return loss * scale
