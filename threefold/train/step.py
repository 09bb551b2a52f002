"""The training step, the same code for every layout; read it from top to bottom.

    1  micro-batches         count what the loss is divided by, over the replicas        all-reduce over dp
    2  forward and backward  micro-batch by micro-batch, in the order of the schedule    those of the parallel layers
    3  gradient sync         sum over replicas, and where gradients are partial          all-reduce over dp·cp, tp, pp
    4  loss and norm         sum loss, squared norm and requests to end the run          all-reduce over the world
    5  clip and update       or skip the update, if the gradients are not finite         none

The loss is divided by the global token count before the backward pass, so gradients are summed over replicas, never
averaged.

`GradientStep` performs 1 to 3, and `Engine` all five for a run's config. In a loop around `threefold.parallelize`, the
`GradientStep` is in the model, and the optimizer performs 4 and 5. In a loop around `threefold.prepare`, the caller
runs the forward passes, and `GradSync` performs 3 in the last backward pass. All of them share the rules of 4 and 5
here: `GradientNorm`, `clip_` and `clip_and_update`. What a step shares with an evaluation is built in `EvaluationStep`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.heartbeat import Activity
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.model import OWN
from threefold.config.rules import executed_micro_batches
from threefold.errors import DivergenceError, UserError
from threefold.models.loss_terms import LossFunction, LossSums
from threefold.models.module_check import explaining_passes
from threefold.models.sharding import ModelPlan, OverSequence
from threefold.ops.exact import Grain, row_norms, row_width
from threefold.parallel.gradients import Gradients
from threefold.parallel.parallelize import PieceSizes, TrainableModel, TrainingSettings
from threefold.parallel.parameter import Weight, has_uneven_shards, is_split
from threefold.parallel.pipeline.stage import StepSamples, TiedWeights
from threefold.torch_private.fake import FakeTensor
from threefold.torch_private.tensors import foreach_norm
from threefold.train.evaluation import EvaluationStep, loss_of_tokens, several, sum_exactly
from threefold.train.fingerprint import Fingerprints
from threefold.train.optim import Optimizer, learning_rate
from threefold.train.optimizers import update_rule
from threefold.train.step_batch import BatchFacts
from threefold.train.stop import Stop, sum_over_ranks
from threefold.train.update_rule import LossScale


class GradientStep(EvaluationStep):
    """A model sharded over a mesh, and the gradients of a global batch's mean loss.

    The last layer computes the loss of a batch of tokens and labels. Otherwise the loss is a function of the last
    layer's output and the batch, which is any nesting of tensors (`threefold.models.own_batch`,
    `threefold.models.loss_terms`).

    The constructor and all methods are collective over the world.

    Args:
        loss_scale: loss scale: multiplies the loss in the backward pass, and divides the gradients afterwards.
        make_model, plan, mesh, settings, activation, loss, stop: see `EvaluationStep`.

    Raises:
        UserError: the plan does not fit the model, or the settings do not fit the layout.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        plan: ModelPlan,
        mesh: Mesh,
        settings: TrainingSettings,
        activation: tuple[int, int, int] | None = None,
        loss: LossFunction | None = None,
        loss_scale: LossScale | None = None,
        stop: Stop | None = None,
    ) -> None:
        super().__init__(make_model, plan, mesh, settings, activation, loss, stop)
        self.loss_scale, self.gradients = loss_scale, self.model.gradients
        self._trained = self.model.trained
        self._partial = partial_over_tensor_ranks(self.model)
        self._in_order = any(has_uneven_shards(weight.parameter) for weight in self.model.weights)
        self._is_first = True
        self._batch: BatchFacts | None = None
        """Facts of the last batch, set by `compute_gradients` and read by `update`."""

    def compute_gradients(
        self, batch: Any, step: int, loss: LossFunction | None = None, rows: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """Compute the gradients of the global batch's mean loss, accumulated over its micro-batches.

        Args:
            batch: this replica's samples of the global batch, the same on all ranks of the replica.
            step: number of the step, from 0; determines the dropout masks.
            loss: loss of the last layer's output; None for the constructor's. If that is None too, the batch is a
                `Batch` of the loader, whose loss the last layer computes. A loss gets it as (tokens, labels).
            rows: int64 [samples], index of each sample in the global batch; None if the replicas hold contiguous
                blocks, in the order of dp. A `Batch` has its own.

        Returns:
            this rank's summand of the mean loss, of its own samples and positions (zero except on the last stage; equal
            on the tensor ranks), or in an exact run that of each leaf; and the number of valid tokens in the global
            batch, or of samples if it is not a `Batch`.

        Raises:
            UserError: batch, model and loss do not fit together, or there is nothing to compute a loss of.
        """
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        loss = loss or self.loss
        # Common errors of a user's own layers are explained.
        with explaining_passes(self.stages, self.mesh.tp.size) if self.plan.constructed else nullcontext():
            # 1. Micro-batches: the replicas add up what they count, as the loss is divided by that of the global batch.
            local: StepSamples
            if loss is None:
                local, self._batch = self._batches.of_tokens(batch, step, scale)
            else:
                local, self._batch = self._batches.of_own(batch, step, loss, rows, scale)
            # 2. Forward and backward passes. Buckets of gradients start their sums over the replicas as they fill; CPU
            # ranks that share memory make them in `finish`.
            self.gradients.begin(self.runner.arrivals)
            if not self.buffers.is_idle:
                self.buffers.begin()
            terms = self.runner.forward_backward(local, self._batch.factor)
            if self._is_first and self.plan.constructed:
                self._require_unchanged_weights()
            self._is_first = False
        # 3. Gradient sync. Over the replicas (dp · cp), each of which had its own samples or positions: wait for the
        # all-reduces, or with ZeRO the reduce-scatters.
        self.mesh.heartbeat.activity(Activity.GRADIENT_SUM)
        self.gradients.finish()
        if not self.buffers.is_idle:
            self.buffers.finish(self._batch.share)
            if (calls := self.parallelism.calls) is not None:
                for name in self.buffers.means:
                    calls.add(f"the buffer {name}, a mean over samples")
        # An exact run sums the gradients of a tied weight's uses separately, as if each were on a stage of its own.
        for leaf, copy in self.model.copies:
            self.gradients[leaf].add_(self.gradients[copy])
        # Over tp: with sequence parallelism, or for per-head norms, the gradients of replicated weights are partial.
        # All other replicated weights already have equal gradients.
        if self._partial:
            self.mesh.tp.all_reduce_together_([self.gradients[leaf] for leaf in self._partial])
        # Tied weights, over the stages that use them: each has the gradient of its own use.
        gradients = {weight.name: self.gradients[weight.leaf] for weight in self._trained}
        self.model.tied.sum_(gradients, self._in_order)
        # The loss scale kept small gradients from vanishing so far, and is divided out now.
        if scale != 1:
            self.gradients.scale_(1 / scale)
        terms = self._once(terms.double()) / scale if self.settings.grain is not None else terms.sum() / scale
        return terms, self._batch.counted

    @property
    def samples(self) -> int:
        """Number of samples of the last global batch."""
        return 0 if self._batch is None else self._batch.samples

    def train_batch(
        self, batch: Any, step: int, loss: LossFunction | None = None, rows: Tensor | None = None
    ) -> LossSums:
        """Compute the gradients as `compute_gradients` does; return the loss and its terms, equal on every rank."""
        term, counted = self.compute_gradients(batch, step, loss, rows)
        assert self._batch is not None
        if self._batch.sums is not None:
            return self._summed(self._batch.sums, self._batch.samples)
        (total,) = sum_over_ranks(self._own_summands(term.double().sum().view(1) * counted), self.mesh, self.stop)
        return loss_of_tokens(total, counted, self._batch.samples)

    def _require_unchanged_weights(self) -> None:
        """Refuse weights that a forward pass changed: the update overwrites narrow weights with their masters."""
        for weight in self.model.weights:
            if weight.master is weight.leaf or isinstance(weight.leaf, FakeTensor):
                continue
            if not torch.equal(weight.leaf, weight.master.to(weight.leaf.dtype)):
                raise UserError(
                    f"forward changes the parameter {weight.name!r}, and in {weight.leaf.dtype} the change would be "
                    "lost, as another copy is updated; compute with a changed copy, keep it in a buffer, or use fp32."
                )


@dataclass(frozen=True)
class StepResult:
    """Result of a training step, the same on every rank.

    Attributes:
        loss: mean over the valid tokens of the global batch, or as the user's loss defines it.
        grad_norm: global gradient norm before clipping.
        lr: learning rate of this update.
        tokens: valid tokens of the global batch (label not ignored); samples if the batch has no tokens.
        tokens_read: all tokens of the global batch except padding; samples if the batch has no tokens.
        skipped: whether no update was made, because the gradient was not finite or the step was refused.
        loss_scale: factor of the loss in the backward pass; None without loss scaling.
        padding: padding tokens of the global batch.
        terms: for a loss of several terms, the unweighted mean of each.
        reason: why the step was refused; empty if it was not.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_read: int
    skipped: bool = False
    loss_scale: float | None = None
    padding: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


class NonFiniteStep(DivergenceError):
    """Error of a step whose loss or gradient norm is not finite, so that no update was made.

    Attributes:
        what, advice: the values, and what to change, as clauses.
        result: result of the step.
    """

    what: str
    advice: str
    result: StepResult


class Engine(GradientStep):
    """Model, gradients and optimizer of a run, sharded over a mesh. Collective over the world.

    Args:
        make_model: constructs the whole, single-device model.
        plan: sharding plan of the model.
        mesh: mesh axes, and this rank's coordinates on them.
        config: resolved config.
        stop: requests to end the run; every step and evaluation sums them over the ranks.
        loss: function of the last layer's output and the batch, for a model that does not compute its loss itself.
        loss_scale: loss scale of the backward pass; None for the config's, which only fp16 has.
        pieces: sizes of the pieces that work is divided into; None for the default sizes.

    Attributes:
        fingerprints: hashes of the weights of an exact run; None for any other run.
    """

    stop: Stop

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
        activation = (executed_micro_batches(config)[1], positions, config.model.hidden_size)
        declared = loss is None and config.model.architecture != OWN  # otherwise the runner finds the shapes
        settings, scale = TrainingSettings.of(config, pieces), loss_scale or LossScale.of(config.precision)
        super().__init__(
            make_model, plan, mesh, settings, activation if declared else None, loss, scale, stop or Stop()
        )
        self.config = config
        rule, axes = update_rule(config.optimizer), self.parallelism.sharding_axes
        exact = settings.grain is not None
        self.optimizer = Optimizer(rule, self.model.weights, self.gradients, config.optimizer, plan, axes, exact)
        self.fingerprints = None if settings.grain is None else Fingerprints(self.model.weights, mesh)
        tied, piece = self.model.tied, settings.pieces.norm_elements
        self._norm = GradientNorm(self.gradients, self.optimizer.entries, mesh, tied, piece, settings.grain)

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
        assert self._batch is not None
        self.mesh.heartbeat.activity(Activity.UPDATE)
        # 4. Loss and norm, equal on every rank, so all ranks make the same decision.
        loss, norm, terms = self._loss_and_norm(local_loss)
        scale, config = self.loss_scale, self.config.optimizer
        lr, used = learning_rate(step + 1, config), None if scale is None else scale.value
        finite = isfinite(loss) and isfinite(norm)
        refused = refuses(loss, norm) if finite and refuses is not None else ""
        skipped = not finite or bool(refused)
        batch = self._batch
        result = StepResult(loss, norm, lr, tokens, batch.read, skipped, used, batch.padding, terms, refused)

        def diverged() -> NonFiniteStep:
            what = f"the loss is {loss:g} and the gradient norm {norm:g}"
            advice = f"lower optimizer.lr ({config.lr:g}), to {config.lr / 2:g} say"
            # A single argument keeps it picklable.
            error = NonFiniteStep(f"Training diverged at step {step + 1}: {what}; {advice}.")
            error.what, error.advice, error.result = what, advice, result
            return error

        # 5. Clip and update.
        clip_and_update(
            self.gradients,
            norm,
            config.clip_grad_norm,
            lambda: self.optimizer.step(lr),
            finite=finite,
            refused=bool(refused),
            scale=scale,
            undo=self.buffers.undo,
            diverged=diverged,
        )
        return result

    def _loss_and_norm(self, loss: Tensor) -> tuple[float, float, dict[str, float]]:
        """Return the loss, the global gradient norm and the terms of the user's loss, in one all-reduce."""
        assert self._batch is not None
        if self.settings.grain is not None:
            return self._exact_loss_and_norm(loss)
        sums = self._batch.sums
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.tp.is_first:
            totals[0] = loss
        if self.loss_scale is None:
            totals[1] = self._norm.squared() + self._norm.uncounted_overflow()
        else:
            totals[1] = self._norm.squared_or_overflow()
        if sums is not None:
            totals = torch.cat([totals, self._own_summands(sums.values(self.mesh.device))])
        mean, squared, *summed = sum_over_ranks(totals, self.mesh, self.stop)
        return mean, squared**0.5, {} if sums is None else several(sums.over_all(summed, 0).terms)

    def _exact_loss_and_norm(self, losses: Tensor) -> tuple[float, float, dict[str, float]]:
        """Return the same for an exact run; each is a sum of many numbers that does not depend on their order."""
        assert self._batch is not None
        overflow, sums = self._norm.uncounted_overflow(), self._batch.sums
        losses = losses if self.mesh.tp.is_first else losses[:0]
        terms = [] if sums is None else self._own_terms(sums)
        (loss, squared, *summed), (others,) = sum_exactly(
            [losses, self._norm.row_squares(), *terms], overflow.view(1), self.mesh, self.stop
        )
        named = {} if sums is None else several(sums.over_all(summed, 0).terms)
        return loss, (squared + others) ** 0.5, named


class GradientNorm:
    """This rank's terms of the global gradient norm, from the current gradients.

    Each gradient counts once, on one of the ranks that hold it.

    Args:
        gradients: gradients of the weights.
        weights: the trained weights of this rank.
        tied: tied weights that several stages hold; None without them.
        piece: number of neighbouring elements, as in `squared_norm`.
        grain: pieces of an exact run's sums; None for any other run.
    """

    def __init__(
        self,
        gradients: Gradients,
        weights: Iterable[Weight],
        mesh: Mesh,
        tied: TiedWeights | None = None,
        piece: int = PieceSizes.norm_elements,
        grain: Grain | None = None,
    ) -> None:
        self._gradients, self._piece, self._device = gradients, piece, mesh.device
        self._counted: list[Tensor] = []
        self._others: list[Tensor] = []
        self._widths: dict[Tensor, int] = {}
        for weight in weights:
            counts = (
                gradients.is_in_norm(weight.leaf)
                and (tied is None or tied.is_primary(weight.name))
                and (is_split(weight.parameter) or mesh.tp.is_first)
            )
            (self._counted if counts else self._others).append(weight.leaf)
            if counts and grain is not None:
                self._widths[weight.leaf] = row_width(weight.parameter, grain)

    def row_squares(self) -> Tensor:
        """Return the squared norm of each row, or piece of a row, of the gradients that this rank counts. fp64 [n].

        No layout inside the grain cuts them further.
        """
        rows = [row_norms(self._gradients[leaf], width) for leaf, width in self._widths.items() if leaf.numel()]
        if not rows:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        return torch.cat(rows).double().square_()

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


def clip_(gradients: Gradients, norm: float, limit: float | None) -> bool:
    """Scale gradients down to the norm `limit` (0 or None for none) if theirs is above; return whether it was."""
    if limit and (coefficient := limit / (norm + _CLIP_EPS)) < 1:
        gradients.scale_(coefficient)
        return True
    return False


def clip_and_update(
    gradients: Gradients,
    norm: float,
    limit: float | None,
    update: Callable[[], None],
    *,
    finite: bool,
    scale: LossScale | None,
    undo: Callable[[], None],
    diverged: Callable[[], UserError],
    refused: bool = False,
) -> None:
    """End a step: clip and update, or skip the update and halve the loss scale. All ranks make the same decision.

    Args:
        gradients: complete gradients of this rank.
        norm: their global norm.
        limit: norm to clip them to; 0 or None for no limit.
        update: makes the update.
        finite: whether gradients and loss are finite.
        scale: loss scale that the gradients were computed with; None without one.
        undo: undoes what the forward passes changed, in a step that makes no update.
        diverged: makes the error to raise if they are not finite, and no smaller loss scale could help.
        refused: whether a finite step makes no update either; it leaves the loss scale as it would be.
    """
    if not finite or refused:
        undo()
    if not finite and (scale is None or scale.is_least):
        raise diverged()
    if scale is not None:
        scale.update(finite)
    if finite and not refused:
        clip_(gradients, norm, limit)
        update()


def partial_over_tensor_ranks(model: TrainableModel) -> list[Tensor]:
    """Return the leaves that tensor ranks hold whole but use on their own positions or heads alone.

    In an exact run, the backward passes of norms and biases sum over the ranks themselves, leaf by leaf.
    """
    how = model.parallelism
    return [
        weight.leaf
        for weight in model.trained
        if how.mesh.tp.size > 1
        and not is_split(weight.parameter)
        and (how.sequence_parallel or model.plan.has_partial_gradient(weight.name))
        and (how.grain is None or isinstance(model.plan.split_of(weight.name), OverSequence))
    ]
