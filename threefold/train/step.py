"""One training step on a rank: scale the loss, compute the gradients, clip by the global norm, update the weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.comm.heartbeat import Activity
from threefold.comm.mesh import Mesh
from threefold.config import Config, OptimizerConfig, PrecisionConfig
from threefold.config.model import OWN
from threefold.errors import DivergenceError
from threefold.models.loss_terms import LossFunction
from threefold.models.sharding import ModelPlan
from threefold.parallel.gradient_step import GradientStep
from threefold.parallel.gradients import Gradients
from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import ShardedMatrix, is_split
from threefold.parallel.settings import PieceSizes, TrainingSettings
from threefold.parallel.weights import Weight, publish_
from threefold.torch_private.tensors import foreach_norm
from threefold.train.lr_schedules import learning_rate
from threefold.train.optimizers.base import Entry, UpdateRule
from threefold.train.optimizers.own import update_rule
from threefold.train.stop import Stop

LEAST = 1.0
"""Smallest loss scale; gradients that overflow at this scale also overflow unscaled."""


class LossScale:
    """Dynamic loss scale of fp16 training; equal on every rank, as all ranks see the same gradient norm.

    Small gradients vanish below fp16's smallest number, 6e-8. The loss is therefore multiplied by a large factor before
    the backward pass, and the gradients are divided by it afterwards (Micikevicius et al., "Mixed precision training",
    arXiv 1710.03740, section 3.2). The scale halves when the gradients overflow, and doubles after enough steps without
    an overflow.

    Args:
        initial: scale of the first step, a power of two, so that multiplying and dividing by it is exact.
        window: steps without overflow after which the scale doubles.

    Attributes:
        value: scale of the next step.
        good_steps: steps without overflow since the scale last changed.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.window = window
        self.value, self.good_steps = initial, 0

    @classmethod
    def of(cls, config: PrecisionConfig) -> "LossScale | None":
        """Return the loss scale that a config asks for; None unless the dtype is fp16."""
        return cls(config.loss_scale, config.loss_scale_window) if config.dtype == "fp16" else None

    @property
    def is_least(self) -> bool:
        return self.value <= LEAST

    def overflowed(self) -> None:
        """Halve the scale, as the gradients of a step were not finite."""
        self.value, self.good_steps = max(LEAST, self.value / 2), 0

    def held(self) -> None:
        """Count a step with finite gradients, and double the scale after `window` of them."""
        self.good_steps += 1
        if self.good_steps == self.window:
            self.value, self.good_steps = self.value * 2, 0


class Optimizer:
    """Optimizer of one rank's parameters.

    Args:
        weights: weights of this rank, with their masters.
        gradients: gradients of these weights.
        config: optimizer settings.
        plan: layers of the model; the weights between the first and the last layer are hidden.
        axes: mesh axes that may shard a parameter.

    Attributes:
        entries: the trained weights.
        rule: update rule of all entries.
        restorations: number of calls of `restored`.

    Raises:
        UserError: the optimizer of another package or of the user cannot be imported or constructed.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        gradients: Gradients,
        config: OptimizerConfig,
        plan: ModelPlan,
        axes: Iterable[Axis],
    ) -> None:
        axes, self._weights, self._gradients = tuple(axes), weights, gradients
        self.entries: list[Entry] = []
        trained = [weight for weight in weights if weight.is_trained]
        for weight in trained:
            parameter = weight.parameter
            whole, hidden = ShardedMatrix(parameter, axes), plan.is_hidden_matrix(weight.name, parameter.dim())
            self.entries.append(Entry(weight.name, parameter, weight.leaf, weight.master, gradients, whole, hidden))
        self.rule: UpdateRule = update_rule(config)(self.entries, config)
        self.restorations = 0
        self._trained = trained

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights once with learning rate `lr`."""
        self.rule.step(lr)
        publish_(self._trained, self._gradients)

    @torch.no_grad()
    def restored(self) -> None:
        """Take over the masters and the tensors of `states` after a checkpoint has filled them."""
        self.rule.restored()
        publish_(self._weights, self._gradients)
        self.restorations += 1

    def stored_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield `states` as global tensors for a checkpoint: sharded like the parameter, or replicated."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value if self.rule.is_replicated(entry, state, value) else entry.stored(value)

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the optimizer state: parameter name, state name, local tensor (scalars are equal on every rank)."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value


class GradientNorm:
    """This rank's terms of the global gradient norm, from the current gradients, in pieces as in `squared_norm`."""

    def __init__(self, model: TrainableModel, entries: Sequence[Entry], piece: int = PieceSizes.norm_elements) -> None:
        self._gradients, self._piece = model.gradients, piece
        self._counted = [entry.leaf for entry in entries if _is_counted(model, entry)]
        self._others = [entry.leaf for entry in entries if not _is_counted(model, entry)]
        self._device = model.parallelism.mesh.device

    def squared(self) -> Tensor:
        """Return this rank's term of the squared norm, over the gradients that it counts. fp64 scalar."""
        return self._of(self._counted)

    def uncounted_overflow(self) -> Tensor:
        """Return 0, or NaN if a gradient that another rank counts is not finite on this rank. fp64 scalar.

        Ranks that share a gradient hold the same bits of it unless the memory or a link of one of them fails. The norm
        would then be finite, and the update of that rank alone would spoil its weights.
        """
        return 0 * self._of(self._others)

    def squared_or_overflow(self) -> Tensor:
        """Return `squared`, or NaN if any gradient of this rank is not finite, counted or not. fp64 scalar."""
        squared = self.squared()
        return squared + 0 * squared + self.uncounted_overflow()

    def _of(self, leaves: Sequence[Tensor]) -> Tensor:
        if not leaves:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return squared_norm(self._gradients.joined(leaves), self._piece)


def _is_counted(model: TrainableModel, entry: Entry) -> bool:
    return (
        model.gradients.is_in_norm(entry.leaf)
        and model.tied.is_primary(entry.name)
        and (is_split(entry.parameter) or model.parallelism.mesh.tp.is_first)
    )


def squared_norm(tensors: Sequence[Tensor], piece: int = PieceSizes.norm_elements) -> Tensor:
    """Sum the squares of all elements in fp64, `piece` neighbours at a time in their own dtype.

    torch sums the squares of a tensor in the tensor's dtype, which loses three digits for fp32 and millions of
    elements. Short pieces lose none that matter, at a third of the cost of fp64 throughout.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms, rest = [], []
    for tensor in tensors:
        flat = tensor.flatten()
        in_pieces = flat.numel() // piece * piece
        if in_pieces:
            norms.append(torch.linalg.vector_norm(flat[:in_pieces].view(-1, piece), dim=1, dtype=wide))
        if in_pieces < flat.numel() or not in_pieces:
            rest.append(flat[in_pieces:])
    if rest:
        norms.append(torch.stack(foreach_norm(rest, dtype=wide)))
    return torch.cat(norms).double().square().sum()


_CLIP_EPS = 1e-6  # same as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class StepResult:
    """Result of a training step, the same on every rank.

    Attributes:
        loss: mean over the valid tokens of the global batch, or as the user's loss defines it.
        grad_norm: global gradient norm before clipping.
        lr: learning rate of this update.
        tokens: valid tokens of the global batch (label not ignored); samples if the batch has no tokens.
        skipped: whether no update was made, because the gradient was not finite or the step was refused.
        loss_scale: factor of the loss in the backward pass; None without loss scaling.
        padding: padding tokens of the global batch.
        terms: unweighted mean of each term of the user's loss.
        refused: reason why the step was refused; empty if it was not.
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
    """Error of a step whose loss or gradient norm is not finite, so that no update was made.

    Attributes:
        what, advice: the values, and what to change, as clauses.
        result: result of the step.
    """

    what: str
    advice: str
    result: StepResult

    @classmethod
    def of(cls, step: int, what: str, advice: str, result: StepResult) -> "NonFiniteStep":
        """Make the error of a step, 1 for the first."""
        error = cls(f"Training diverged at step {step}: {what}; {advice}.")  # a single argument keeps it picklable
        error.what, error.advice, error.result = what, advice, result
        return error


class Engine(GradientStep):
    """Model, gradients and optimizer of a run, sharded over a mesh. Collective over the world.

    Args:
        make_model: constructs the whole, single-device model.
        plan: sharding plan of the model.
        mesh: mesh axes, and this rank's place on them.
        config: resolved config.
        stop: requests to end the run; every step and evaluation sums them over the ranks.
        loss: function of the last layer's output and the batch, for a model that does not compute its loss itself.
        loss_scale: loss scale of the backward pass; None for the config's, which only fp16 has.
        pieces: sizes of the pieces that work is divided into; None for the default sizes.
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
        declared = loss is None and config.model.architecture != OWN  # otherwise the runner finds the shapes
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
        """Make one update from a global batch.

        Args:
            batch: this replica's rows of the global batch.
            step: 0 for the first; determines the dropout masks and the learning rate.

        Raises:
            NonFiniteStep: see `update`.
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
        """Compute the gradients of a global batch, with the run's loss and loss scale by default."""
        if scale is None:
            scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        return super().compute_gradients(batch, step, loss or self.loss, rows, scale)

    def update(
        self, local_loss: Tensor, tokens: int, step: int, refuses: Callable[[float, float], str] | None = None
    ) -> StepResult:
        """Clip the gradients by their global norm and update the weights.

        With a loss scale, if the loss or the norm is not finite (on all ranks alike), the update is skipped and the
        scale halves.

        Args:
            local_loss, tokens: results of `compute_gradients`.
            step: 0 for the first.
            refuses: returns why a step with this loss and norm, both finite, must not update; empty to update.

        Raises:
            NonFiniteStep: the loss or the norm is not finite, and no smaller loss scale could help.
        """
        self.mesh.heartbeat.activity(Activity.UPDATE)
        loss, norm = self._loss_and_norm(local_loss)
        lr, scale = learning_rate(step + 1, self.config.optimizer), self.loss_scale
        used = None if scale is None else scale.value
        finite = isfinite(loss) and isfinite(norm)
        refused = refuses(loss, norm) if finite and refuses is not None else ""
        makes_update = finite and not refused
        result = StepResult(loss, norm, lr, tokens, not makes_update, used, self._padding, self._terms, refused)
        if not makes_update:
            self.buffers.undo()
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
        """Return the summed loss and the number of valid tokens of a global batch; gradients and random state are kept.

        For a user's loss with one term, return its sum and its count; with several terms, the mean times the number of
        samples, and that number. Experts drop no token, whatever their capacity, as in a trained model.
        """
        found = self.eval_batch(batch, self.loss)
        if len(found.counts) > 1:
            return found.loss * found.samples, found.samples
        (name,) = found.counts
        return found.weighted[name], int(found.counts[name])

    def _loss_and_norm(self, loss: Tensor) -> tuple[float, float]:
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
        """Sum numbers over all ranks; the requests to end the run travel in the same small collective."""
        # Fill on the device: copying a tensor from a Python number would block the host.
        request = torch.full((1,), self.stop.request(), dtype=totals.dtype, device=totals.device)
        *summed, requests = super()._sum_over_ranks(torch.cat([totals, request]))
        self.stop.receive(requests)
        return summed
