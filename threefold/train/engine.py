"""One training step, the same for every layout: micro-batches, gradient sync, clip, update."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.heartbeat import Activity
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.model import OWN
from threefold.models.loss_terms import LossFunction
from threefold.models.sharding import ModelPlan
from threefold.parallel.gradient_step import GradientStep
from threefold.parallel.settings import PieceSizes, TrainingSettings
from threefold.train.divergence import DivergenceError
from threefold.train.gradient_norm import GradientNorm
from threefold.train.loss_scale import LossScale
from threefold.train.optimizer import Optimizer
from threefold.train.schedule import learning_rate
from threefold.train.stop import Stop

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank.

    Attributes:
        loss: mean over the valid tokens of the global batch, or as an own loss says.
        grad_norm: global norm of the gradient, before it was clipped.
        lr: the learning rate of this update.
        tokens: valid tokens of the global batch, those without ignored labels; of a batch without tokens its samples.
        skipped: whether the gradient was not finite or the step refused, so that no update was made.
        loss_scale: what the loss was multiplied by for the backward pass; None where it never is.
        padding: tokens that fill the global batch's samples up to their length.
        terms: the mean of each term of an own loss, not weighted.
        refused: why the step was refused; empty where it was not.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: bool = False
    loss_scale: float | None = None
    padding: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""


class NonFiniteStep(DivergenceError):
    """The loss or the gradient norm of a step is not finite, so that no update was made.

    Attributes:
        what: the values, as a clause.
        advice: what to change, as a clause.
        result: of the step.
    """

    what: str
    advice: str
    result: StepResult

    @classmethod
    def of(cls, step: int, what: str, advice: str, result: StepResult) -> "NonFiniteStep":
        """That of a step, 1 for the first."""
        error = cls(f"Training diverged at step {step}: {what}; {advice}.")  # one argument, so that it can be pickled
        error.what, error.advice, error.result = what, advice, result
        return error


class Engine(GradientStep):
    """A model, its gradients and its optimizer, spread over a mesh.

    Collective over the world.

    Args:
        make_model: makes the whole, single-device model.
        plan: how it is cut.
        mesh: its axes, and this rank's place on them.
        config: resolved.
        stop: sums over the ranks, in each step and evaluation, which of them ask to end the run.
        loss: of the last layer's output and the batch, for a model that does not compute it in its last layer.
        loss_scale: of the backward pass; None for that of the config, which only fp16 has.
        pieces: sizes that work is divided by; None for the usual ones.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        plan: ModelPlan,
        mesh: Mesh,
        config: Config,
        stop: Stop | None = None,
        loss: LossFunction | None = None,
        loss_scale: LossScale | None = None,
        pieces: PieceSizes | None = None,
    ) -> None:
        positions = config.data.sequence_length // config.parallel.cp
        if config.parallel.sequence_parallel:
            positions //= config.parallel.tp
        activation = (config.train.micro_batch_size, positions, config.model.hidden_size)
        declared = loss is None and config.model.architecture != OWN  # else the runner finds the shapes
        settings = TrainingSettings.of(config, pieces)
        super().__init__(make_model, plan, mesh, settings, activation if declared else None)
        self.config, self.loss, self.stop = config, loss, stop or Stop()
        self._terms: dict[str, float] = {}
        self.optimizer = Optimizer(
            self.model.weights, self.gradients, config.optimizer, plan, self.parallelism.sharding_axes
        )
        self._norm = GradientNorm(self.model, self.optimizer.entries, settings.pieces.norm_elements)
        self.loss_scale = loss_scale or LossScale.of(config.precision)

    def train_step(self, batch: Any, step: int) -> StepResult:
        """One update from a global batch.

        Args:
            batch: this replica's rows of it.
            step: 0 for the first; decides the dropout masks and the learning rate.

        Raises:
            NonFiniteStep: as `update` says.
            UserError: all labels are ignored.
        """
        loss, tokens = self.compute_gradients(batch, step)
        return self.update(loss, tokens, step)

    def compute_gradients(
        self,
        batch: Any,
        step: int,
        loss: LossFunction | None = None,
        rows: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, int]:
        """As `GradientStep.compute_gradients`, with the loss and the loss scale of the run where none are given."""
        if scale is None:
            scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        return super().compute_gradients(batch, step, loss or self.loss, rows, scale)

    def update(
        self, local_loss: Tensor, tokens: int, step: int, refuses: Callable[[float, float], str] | None = None
    ) -> StepResult:
        """Clip the gradients by their global norm and update the weights.

        Where there is a loss scale and loss or norm are not finite, on all ranks alike, nothing is updated and
        the scale halves.

        Args:
            local_loss, tokens: from `compute_gradients`.
            step: 0 for the first.
            refuses: why a step with this loss and norm, both finite, is to make no update; empty where it makes one.

        Raises:
            NonFiniteStep: loss or norm are not finite, and no smaller loss scale could help.
        """
        self.mesh.heartbeat.activity(Activity.UPDATE)
        loss, norm = self._loss_and_norm(local_loss)
        lr, scale = learning_rate(step + 1, self.config.optimizer), self.loss_scale
        used = None if scale is None else scale.value
        finite = isfinite(loss) and isfinite(norm)
        refused = refuses(loss, norm) if finite and refuses is not None else ""
        makes_update = finite and not refused
        result = StepResult(loss, norm, lr, tokens, not makes_update, used, self._padding, self._terms, refused)
        if not finite and (scale is None or scale.is_least):
            what = f"the loss is {loss:g} and the gradient norm {norm:g}"
            rate = self.config.optimizer.lr
            raise NonFiniteStep.of(step + 1, what, f"lower optimizer.lr ({rate:g}), to {rate / 2:g} say", result)
        if scale is not None:
            scale.held() if finite else scale.overflowed()
        if makes_update:
            limit = self.config.optimizer.clip_grad_norm
            if limit and (coefficient := limit / (norm + _CLIP_EPS)) < 1:
                self.gradients.scale_(coefficient)
            self.optimizer.step(lr)
        return result

    def evaluate(self, batch: Any) -> tuple[float, int]:
        """Summed loss and number of valid tokens of a global batch; gradients and randomness stay as they are.

        Of an own loss with one term, its sum and what it counts; of one with several, the mean times the number of
        samples, and that.

        As a trained model is used: experts drop no token, whatever their capacity.
        """
        found = self.eval_batch(batch, self.loss)
        if len(found.counts) > 1:
            return found.loss * found.samples, found.samples
        (name,) = found.counts
        return found.weighted[name], int(found.counts[name])

    def _loss_and_norm(self, loss: Tensor) -> tuple[float, float]:
        """The mean loss and the norm of the gradient."""
        terms = None if self._sums is None else self._own_summands(self._sums.values(self.mesh.device))
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.tp.is_first:
            totals[0] = loss
        if self.loss_scale is None:
            totals[1] = self._norm.squared() + self._norm.uncounted_overflow()
        else:
            totals[1] = self._norm.squared_or_overflow()
        mean, squared, *summed = self._sum_over_ranks(totals if terms is None else torch.cat([totals, terms]))
        self._terms = {} if self._sums is None else self._sums.over_all(summed, 0).terms
        return mean, squared**0.5

    def _sum_over_ranks(self, totals: Tensor) -> list[float]:
        """Numbers, each summed over all ranks; with them, in the one small collective, go the requests to end the
        run."""
        # Filled on the device: a tensor of a Python number would be copied there while the host waits.
        request = torch.full((1,), self.stop.request(), dtype=totals.dtype, device=totals.device)
        *summed, requests = super()._sum_over_ranks(torch.cat([totals, request]))
        self.stop.receive(requests)
        return summed
