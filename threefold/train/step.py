"""Dynamic loss scaling of fp16 training.

Small gradients vanish below fp16's smallest number, 6e-8. So the loss is multiplied by a large number before the
backward pass, and the gradients divided by it after (Micikevicius et al., "Mixed precision training", arXiv
1710.03740, section 3.2). The scale is as large as it can be: it halves where the gradients overflow, and doubles after
enough steps in which they do not.
"""

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
from threefold.models.loss_terms import LossFunction
from threefold.models.sharding import ModelPlan
from threefold.parallel.gradient_step import GradientStep
from threefold.parallel.gradients import Gradients
from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import ShardedMatrix, is_split
from threefold.parallel.settings import PieceSizes, TrainingSettings
from threefold.parallel.weights import Weight, publish_
from threefold.torch_private.tensors import foreach_norm
from threefold.train.divergence import DivergenceError
from threefold.train.lr_schedules import learning_rate
from threefold.train.optimizers.base import Entry, UpdateRule
from threefold.train.optimizers.own import update_rule
from threefold.train.stop import Stop

LEAST = 1.0
"""The smallest scale; gradients that overflow at this one overflow unscaled."""


class LossScale:
    """The scale, and for how many steps without overflow; the same on every rank, as all have the same gradient norm.

    Args:
        initial: of the first step, a power of two, so that multiplying and dividing round nothing.
        window: steps without overflow after which it doubles.

    Attributes:
        value: of the coming step.
        good_steps: without overflow, since it last changed.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.window = window
        self.value, self.good_steps = initial, 0

    @classmethod
    def of(cls, config: PrecisionConfig) -> "LossScale | None":
        """That of a run; None without loss scaling, which no precision but fp16 needs."""
        return cls(config.loss_scale, config.loss_scale_window) if config.dtype == "fp16" else None

    @property
    def is_least(self) -> bool:
        """Whether it cannot halve any more."""
        return self.value <= LEAST

    def overflowed(self) -> None:
        """The gradients of a step were not finite: halve."""
        self.value, self.good_steps = max(LEAST, self.value / 2), 0

    def held(self) -> None:
        """The gradients of a step were finite: double after `window` such steps."""
        self.good_steps += 1
        if self.good_steps == self.window:
            self.value, self.good_steps = self.value * 2, 0


class Optimizer:
    """Updates a rank's parameters.

    Args:
        weights: with their masters.
        gradients: theirs.
        config: which optimizer, and its constants.
        plan: the model's layers; the weights between the first and the last are hidden.
        axes: those that may cut a parameter.

    Attributes:
        entries: the weights that are trained.
        rule: the update of each.
        restorations: how often `restored` was called.

    Raises:
        UserError: the optimizer is another package's or the user's and cannot be imported or made.
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
        """One update with learning rate `lr`."""
        self.rule.step(lr)
        publish_(self._trained, self._gradients)

    @torch.no_grad()
    def restored(self) -> None:
        """Take over masters, and tensors of `states`, that have been filled from a checkpoint."""
        self.rule.restored()
        publish_(self._weights, self._gradients)
        self.restorations += 1

    def stored_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """As `states`, as global tensors for a checkpoint: sharded as the parameter is, or replicated."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value if self.rule.is_replicated(entry, state, value) else entry.stored(value)

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """The optimizer state: parameter name, state name, local tensor (scalars are the same on every rank)."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value


class GradientNorm:
    """This rank's terms of the norm, of gradients as they are when asked for.

    Args:
        model: which it trains.
        entries: its weights.
        piece: elements whose squares are added up in the gradients' own dtype.
    """

    def __init__(self, model: TrainableModel, entries: Sequence[Entry], piece: int = PieceSizes.norm_elements) -> None:
        self._gradients, self._piece = model.gradients, piece
        self._counted = [entry.leaf for entry in entries if _is_counted(model, entry)]
        self._others = [entry.leaf for entry in entries if not _is_counted(model, entry)]
        self._device = model.parallelism.mesh.device

    def squared(self) -> Tensor:
        """This rank's term of the squared norm: of the gradients that it is the one to count. fp64 scalar."""
        return self._of(self._counted)

    def uncounted_overflow(self) -> Tensor:
        """Zero, or not a number where a gradient that another rank counts is not finite on this one. fp64 scalar.

        The ranks that have a gradient in common have the same bits of it, unless memory or a link of one fails: then
        the norm would be finite, and the update of this rank alone would spoil its weights.
        """
        return 0 * self._of(self._others)

    def squared_or_overflow(self) -> Tensor:
        """`squared`, or not a number where any gradient of this rank is not finite, those included that another rank
        counts. fp64 scalar."""
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
    """Sum of squares of all elements, in fp64; those of `piece` neighbours are added up in their own dtype.

    Torch adds the squares of a tensor up in its own dtype, which for fp32 and millions of elements loses three digits;
    by short pieces it loses none that matter, at a third of the cost of working in fp64 throughout.
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
