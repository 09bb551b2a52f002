"""Running the micro-batches of a step: one loop without a pipeline, torch's schedules with one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B

from threefold.parallel.apply import Division
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.samples import NOTHING, Samples


@dataclass(frozen=True)
class Work:
    """A replica's samples of one step.

    Attributes:
        tokens, labels: int64 [B, S], this rank's positions of each sequence.
        samples: dropout keys and documents.
    """

    tokens: Tensor
    labels: Tensor
    samples: Samples = NOTHING

    def split(self, parts: int) -> list["Work"]:
        """Micro-batches of equal size.

        Raises:
            ValueError: the samples do not divide by `parts`.
        """
        if len(self.tokens) % parts:
            raise ValueError(f"{len(self.tokens)} samples do not divide into {parts} micro-batches")
        facts = [[None] * parts if fact is None else fact.chunk(parts) for fact in self.samples]
        samples = [Samples(*each) for each in zip(*facts, strict=True)]
        return [Work(*each) for each in zip(self.tokens.chunk(parts), self.labels.chunk(parts), samples, strict=True)]


class Runner(ABC):
    """Runs a replica's micro-batches through its stages.

    Attributes:
        has_loss: whether this rank has the last stage, which computes the loss.
    """

    has_loss: bool

    @abstractmethod
    def forward_backward(self, work: Work, scale: float) -> Tensor:
        """Forward and backward passes of all micro-batches; gradients add up in the parameters' leaves.

        Args:
            work: the replica's samples, the same on all its stages.
            scale: what each summed loss is multiplied by (one over the number of tokens that count).

        Returns:
            the scaled loss of all micro-batches together where `has_loss`, zero elsewhere (fp32 or fp64 scalar).
        """

    @abstractmethod
    def evaluate(self, work: Work) -> Tensor:
        """The summed loss of all micro-batches, without gradients, where `has_loss`; zero elsewhere."""


class LoopRunner(Runner):
    """One stage: a plain loop.

    Args:
        stage: the whole model (or this tensor rank's part of it).
        micro_batches: how many the samples are cut into.
    """

    has_loss = True

    def __init__(self, stage: Stage, micro_batches: int) -> None:
        self.stage, self.micro_batches = stage, micro_batches

    def forward_backward(self, work: Work, scale: float) -> Tensor:
        losses = []
        for micro in work.split(self.micro_batches):
            loss = self.stage(micro.tokens, micro.labels, micro.samples) * scale
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, work: Work) -> Tensor:
        losses = [self.stage(micro.tokens, micro.labels, micro.samples) for micro in work.split(self.micro_batches)]
        return torch.stack(losses).sum()


class _Schedule1F1BAnyCount(Schedule1F1B):
    """1F1B that also takes fewer micro-batches than stages.

    Its algorithm is right for them (the warm-up is cut to the micro-batches there are); only the check in its
    constructor refuses.
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: object) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)  # type: ignore[arg-type]


_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"1f1b": _Schedule1F1BAnyCount, "gpipe": ScheduleGPipe}


class _Chunk(nn.Module):
    """A stage as torch's schedules call it: they cut tensors among the micro-batches, so facts come one by one."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, labels: Tensor | None = None, **facts: Tensor) -> Tensor:
        out: Tensor = self.stage(x, labels, Samples(**facts))
        return out


class PipelineRunner(Runner):
    """Several stages, run by one of `torch.distributed.pipelining`'s schedules.

    The activations' shape is declared, so that stages never exchange metadata.

    Args:
        stages: this rank's.
        division: says where the others are.
        schedule: its name in `parallel.schedule`.
        micro_batches: how many the samples are cut into.
        activation: shape [b, S, H] of one micro-batch's activations between stages.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        division: Division,
        schedule: str,
        micro_batches: int,
        activation: tuple[int, int, int],
    ) -> None:
        self.mesh, self.schedule_name, self.micro_batches = division.mesh, schedule, micro_batches
        self.activation, self.dtype = activation, division.dtype
        self.has_loss = stages[-1].is_last
        self._zero = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.mesh.device)
        self._train = self._make_schedule(stages[0])
        # A stage of its own: torch's remembers buffers and shapes of the last pass, with or without gradients.
        self._eval = self._make_schedule(stages[0])

    @property
    def pipe(self) -> PipelineStage:
        """Torch's own record of the stage, for what is alive and what was sent."""
        return self._train._stage  # type: ignore[return-value]

    def _make_schedule(self, stage: Stage) -> PipelineScheduleSingle:
        mesh = self.mesh
        tokens = torch.empty(self.activation[:2], dtype=torch.int64, device="meta")
        hidden = torch.empty(self.activation, dtype=self.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=self._zero.dtype, device="meta", requires_grad=True)
        pipe = PipelineStage(
            _Chunk(stage),
            mesh.pp.index,
            mesh.pp.size,
            mesh.device,
            input_args=tokens if mesh.is_first_stage else hidden,
            output_args=loss if mesh.is_last_stage else hidden,
            group=mesh.pp.group,
        )
        return _SCHEDULES[self.schedule_name](
            pipe, n_microbatches=self.micro_batches, loss_fn=_scaled, scale_grads=False
        )

    def forward_backward(self, work: Work, scale: float) -> Tensor:
        return self._loss(self._train.step, work, scale)

    @torch.no_grad()
    def evaluate(self, work: Work) -> Tensor:
        return self._loss(self._eval.eval, work, 1.0)

    def _loss(self, run: Callable[..., Any], work: Work, scale: float) -> Tensor:
        losses: list[Tensor] = []
        run(
            *([work.tokens] if self.mesh.is_first_stage else []),
            target=work.labels if self.mesh.is_last_stage else None,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"scale": scale},
            labels=work.labels,
            **{name: fact for name, fact in work.samples._asdict().items() if fact is not None},
        )
        return torch.stack([loss.detach() for loss in losses]).sum() if self.mesh.is_last_stage else self._zero


def _scaled(loss: Tensor, _labels: Tensor, *, scale: float) -> Tensor:
    """The last stage has computed the summed loss already; its labels came as a keyword."""
    return loss * scale
