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
runs the forward passes, and `GradSync` performs 3 in the last backward pass. All of them are a `GradientUpdate`, whose
code from the gradients to the update they share.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.heartbeat import Activity
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.config.rules import executed_micro_batches
from threefold.constants import IGNORE_INDEX
from threefold.doors import call_hook, needed
from threefold.errors import DivergenceError, UserError
from threefold.models.custom_batch import map_tensors, tensors_of
from threefold.models.loss_terms import LOSS, LossFunction, LossSums, TermSums
from threefold.models.sharding import ModelPlan
from threefold.parallel.expert_biases import ExpertBiases
from threefold.parallel.parallelize import ChunkSizes, Parallelism, TrainableModel, TrainingSettings, apply_parallelism
from threefold.parallel.parameter import is_split
from threefold.parallel.pipeline.runner import LoopRunner, PipelineRunner, Runner
from threefold.parallel.pipeline.stage import CustomBatch, LocalBatch, StepSamples
from threefold.parallel.recompute import as_written
from threefold.parallel.running_statistics import RunningStatistics
from threefold.random.rng import ProcessGenerators, generators_preserved
from threefold.torch_private.fake import FakeTensor
from threefold.train.gradient_update import GradientUpdate, LossScale
from threefold.train.model_view import ActivationWatches, ModelView
from threefold.train.optim import Optimizer, learning_rate
from threefold.train.optimizers import update_rule
from threefold.train.step_batch import BatchFacts, BatchPreparation, is_of_tokens
from threefold.train.stop import Stop, sum_over_ranks


class GradientStep(GradientUpdate):
    """A model sharded over a mesh, and the gradients of a global batch's mean loss.

    The last layer computes the loss of a batch of tokens and labels. Otherwise the loss is a function of the last
    layer's output and the batch, which is any nesting of tensors (`threefold.models.custom_batch`,
    `threefold.models.loss_terms`). The constructor and all methods are collective over the world.

    Args:
        activation: shape [b, S, H] of a micro-batch's activations between pipeline stages; None to find it at the first
            step.
        loss: loss where a call gives none; None if the last layer computes it.
        loss_scale: multiplies the loss in the backward pass, and divides the gradients afterwards.
        stop: requests to end the run, which every sum over the ranks adds up; None without them.

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
        if loss is not None:
            settings = replace(settings, is_custom=True)
        self.plan, self.settings, self.stop, self.loss = plan, settings, stop, loss
        self.parallelism = Parallelism.make(plan, mesh, settings)
        self.model = apply_parallelism(make_model, plan, self.parallelism)
        self._make_model = make_model
        self.stages, self.streams = self.model.stages, self.model.streams
        self.buffers = RunningStatistics(self.stages, plan, mesh)
        super().__init__(
            mesh,
            self.model.gradients,
            self.model.weights,
            partial_over_tensor_ranks(self.model),
            loss_scale,
            buffers=self.buffers,
            tied=self.model.tied,
            copies=self.model.copies,
            at_once=settings.chunks.norm_elements,
            arithmetic=self.parallelism.arithmetic,
            biases=ExpertBiases(self.stages, plan, mesh, settings.parallel.sequence_parallel),
        )
        self.generators = ProcessGenerators(mesh.coordinates, mesh.device)  # for user models that draw from them
        self.runner = self._make_runner(activation)
        self._batches = BatchPreparation(self.model, settings, self.runner, self.preserved)
        self.watches = ActivationWatches(self.stages, make_model, mesh.rank)
        self._is_first = True
        self._batch: BatchFacts | None = None
        """Facts of the last batch, set by `compute_gradients` and read by `update`."""

    def compute_gradients(
        self,
        batch: Any,
        step: int,
        loss: LossFunction | None = None,
        rows: Tensor | None = None,
        outputs: dict[int, Any] | None = None,
    ) -> tuple[Tensor, int]:
        """Compute the gradients of the global batch's mean loss, accumulated over its micro-batches.

        Args:
            batch: this replica's samples of the global batch, the same on all ranks of the replica.
            step: number of the step, from 0; determines the dropout masks.
            loss: loss of the last layer's output; None for the constructor's. If that is None too, the batch is a
                `Batch` of the loader, whose loss the last layer computes. A loss gets it as (tokens, labels).
            rows: int64 [samples], index of each sample in the global batch; None if the replicas hold contiguous
                blocks, in the order of dp. A `Batch` has its own.
            outputs: collects, on the last stage, what the last layer returns, by the number of the micro-batch; only
                with a loss.

        Returns:
            this rank's summands of the mean loss, of its local samples and positions (zero except on the last stage;
            equal on the tensor ranks), one in all or one for each micro-batch (`RankArithmetic.losses`); and the
            number of valid tokens in the global batch, or of samples if it is not a `Batch`.

        Raises:
            UserError: batch, model and loss do not fit together, or there is nothing to compute a loss of.
        """
        scale, loss = self.scale, loss or self.loss
        # Common errors of custom layers are explained.
        explained = call_hook("explaining_passes", self.stages, self.mesh.tp.size) if self.plan.constructed else None
        with explained or nullcontext():
            # 1. Micro-batches: the replicas add up what they count, as the loss is divided by the global batch's count.
            local: LocalBatch | CustomBatch
            if loss is None:
                local, self._batch = self._batches.of_tokens(batch, step, scale)
            else:
                local, self._batch = self._batches.of_custom(batch, step, loss, rows, scale, outputs)
            if self._is_first:
                self._check_first(batch, loss, local)
            # 2. Forward and backward passes. Buckets of gradients start their sums over the replicas as they fill; CPU
            # ranks that share memory make them in `finish`.
            self.begin(self.runner.arrivals(local.size))
            self._batches.take_terms()
            with self.watches.during(step + 1):
                losses = self.runner.forward_backward(local, self._batch.factor)
            if loss is None:
                self._batches.take_terms(self._batch.sums)
            if self._is_first and self.plan.constructed:
                self._require_unchanged_weights()
            self._is_first = False
        # 3. Gradient sync, and the loss scale divided out.
        self.mesh.heartbeat.activity(Activity.GRADIENT_SUM)
        self.finish(self._batch.fraction)
        for name in () if self.buffers.is_idle else self.buffers.means:
            self.arithmetic.note(f"the buffer {name}, a mean over samples")
        self.unscale_(scale)
        return self.arithmetic.losses(losses) / scale, self._batch.counted

    @property
    def view(self) -> ModelView:
        """Return the model as callbacks see it."""
        return ModelView(self, self.watches, self.model.names, tuple(self.plan.layers), self.settings.compile)

    @property
    def samples(self) -> int:
        """Number of samples of the last global batch."""
        return 0 if self._batch is None else self._batch.samples

    def train_batch(
        self,
        batch: Any,
        step: int,
        loss: LossFunction | None = None,
        rows: Tensor | None = None,
        outputs: dict[int, Any] | None = None,
    ) -> LossSums:
        """Compute the gradients as `compute_gradients` does; return the loss and its terms, equal on every rank."""
        summands, counted = self.compute_gradients(batch, step, loss, rows, outputs)
        assert self._batch is not None
        if self._batch.sums is not None:
            return self._summed(self._batch.sums, self._batch.samples)
        (total,) = sum_over_ranks(self._local_summands(summands.double().sum().view(1) * counted), self.mesh, self.stop)
        return _loss_of_tokens(total, counted, self._batch.samples)

    def eval_batch(
        self, batch: Any, loss: LossFunction | None = None, outputs: dict[int, Any] | None = None
    ) -> LossSums:
        """Return the loss of a global batch in evaluation mode; gradients and random states stay unchanged.

        There is no dropout, and experts drop no tokens, whatever their capacity. The loss and its terms are equal on
        every rank; those of several batches can be added. Takes and refuses what `compute_gradients` does.
        """
        loss = loss or self.loss
        with self.preserved(), self._in_evaluation_mode(), as_written(self.settings.compile):
            if loss is not None:
                local, sizes = self._batches.custom_samples(batch, loss, outputs=outputs)
                self.runner.evaluate(local)
                assert local.loss is not None  # it is `loss`, with its counts
                return self._summed(local.loss, sum(sizes))
            tokens = self._batches.local_batch(batch)
            self._batches.take_terms()
            losses = self.runner.evaluate(tokens)
        if self.plan.of_pairs:
            sums = self._batches.evaluated_terms(batch)
            return self._summed(sums, int(next(iter(sums.counts.values()))))
        assert tokens.labels is not None  # a `Batch` has them
        count = (tokens.labels != IGNORE_INDEX).sum().double().view(1)
        (summed,), (counted,) = self._totals([self.arithmetic.losses(losses)], count)
        return _loss_of_tokens(summed, int(counted), len(batch.labels) * self.mesh.dp.size)

    def evaluate(self, batch: Any) -> tuple[float, int]:
        """Return the summed loss of `eval_batch`, and the number of valid tokens.

        For a user's loss with one term, return its sum and its count; with several terms, the mean times the number of
        samples, and that number.
        """
        found = self.eval_batch(batch)
        if len(found.counts) > 1:
            return found.loss * found.samples, found.samples
        (name,) = found.counts
        return found.weighted[name], int(found.counts[name])

    @contextmanager
    def preserved(self, streams: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Restore random streams, generators and buffers after the block, which starts with `streams` if given."""
        with self.streams.preserved(streams), generators_preserved(self.mesh.device), self.buffers.preserved():
            yield

    @contextmanager
    def _in_evaluation_mode(self) -> Iterator[None]:
        modes = [(module, module.training) for stage in self.stages for module in stage.modules()]
        for stage in self.stages:
            stage.eval()
        try:
            yield
        finally:
            for stage in self.stages:
                stage.train()
            for module, mode in modes:  # a constructor may leave a part of its model in evaluation mode
                module.training = mode

    def _summed(self, sums: TermSums, samples: int) -> LossSums:
        """Return the loss terms, summed over all ranks."""
        none = torch.zeros(0, dtype=torch.float64, device=self.mesh.device)
        return sums.over_all(self._totals(sums.values(self.mesh.device), none)[0], samples)

    def _totals(self, values: Sequence[Tensor], counts: Tensor) -> tuple[list[float], list[float]]:
        """Sum losses and counts over all ranks."""
        local = [self._local_summands(each) for each in values]
        return self.arithmetic.totals(local, self._local_summands(counts), self._over_ranks)

    def _over_ranks(self, totals: Tensor) -> list[float]:
        return sum_over_ranks(totals, self.mesh, self.stop)

    def _local_summands(self, totals: Tensor) -> Tensor:
        """Return this rank's summands: zero except on the first tensor rank of the last stage."""
        return totals if self.runner.has_loss and self.mesh.tp.is_first else torch.zeros_like(totals)

    def _make_runner(self, activation: tuple[int, int, int] | None) -> Runner:
        model, count, pp = self.model, self.settings.micro_batches, self.mesh.pp.size
        if pp == 1:
            return LoopRunner(model.stages[0], self.settings, self.mesh.heartbeat, self.arithmetic)
        schedule = self.settings.parallel.pipeline_schedule
        if not schedule.accepts(pp, count):
            raise UserError(
                f"micro_batches is {count} but the schedule {schedule.name} {schedule.micro_batch_rule(pp, count)}; "
                f"use {next(larger for larger in range(count, 4 * pp * count + 1) if schedule.accepts(pp, larger))}."
            )
        how = self.parallelism, schedule, activation
        return PipelineRunner(model.stages, *how, model.gradients.add_, model.first_trained)

    def _check_first(self, batch: Any, loss: LossFunction | None, local: LocalBatch | CustomBatch) -> None:
        """Check a user's model with the shapes of its first batch, and place its dropout layers."""
        if not self.plan.constructed and not self.model.dropouts:
            return
        whole: StepSamples = local
        if is_of_tokens(batch):
            if loss is None:
                whole = LocalBatch(batch.tokens, batch.labels, local.samples)
            batch = (batch.tokens, batch.labels)
        if any(isinstance(each, FakeTensor) for each in tensors_of(batch)):  # of a dry run, which computes no values
            return
        if self.plan.constructed and not self.settings.parallel.sequence_parallel:
            trial = map_tensors(batch, lambda each: torch.empty_like(each, device="meta"))
            call_hook("check_forward", self._make_model, self.plan, self.mesh.tp.size, trial, loss is None)
        context = self.parallelism.context
        if self.model.dropouts and (context.tp.size > 1 or context.cut.shares > 1):
            micro_batch = whole.split(self.settings.parts(whole.size))[0]
            find = needed("dropout_parts", "dropout between the sharded layers of a custom model", "verify")
            parts = find(self._make_model, self.plan, context, micro_batch)
            for name, dropout in self.model.dropouts.items():
                dropout.place(parts.get(name, {}))

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


def _loss_of_tokens(total: float, count: int, samples: int) -> LossSums:
    return LossSums({LOSS: total}, {LOSS: total}, {LOSS: count}, samples)


def partial_over_tensor_ranks(model: TrainableModel) -> list[Tensor]:
    """Return the leaves that tensor ranks hold whole but use on local positions or heads alone."""
    how = model.parallelism
    return [
        weight.leaf
        for weight in model.trained
        if how.mesh.tp.size > 1
        and not is_split(weight.parameter)
        and (how.settings.parallel.sequence_parallel or model.plan.has_partial_gradient(weight.name))
        and not how.arithmetic.completes(model.plan.split_of(weight.name))
    ]


@dataclass(frozen=True)
class StepResult:
    """Result of a training step, the same on every rank; its fields are those of `StepRecord`."""

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
    """Error of a step whose loss or gradient norm is not finite; `what` and `advice` are clauses of its message."""

    what: str
    advice: str
    result: StepResult


class Engine(GradientStep):
    """Model, gradients and optimizer of a run, sharded over a mesh. Collective over the world.

    Args:
        loss_scale: loss scale of the backward pass; None for the config's, which only fp16 has.
        chunks: sizes of the chunks that work is divided into; None for the default sizes.
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
        chunks: ChunkSizes | None = None,
    ) -> None:
        positions = config.data.sequence_length // config.parallel.cp
        if config.parallel.sequence_parallel:
            positions //= config.parallel.tp
        activation = (executed_micro_batches(config)[1], positions, config.model.hidden_size)
        declared = loss is None and config.model.architecture != CUSTOM  # otherwise the runner finds the shapes
        settings, scale = TrainingSettings.of(config, chunks), loss_scale or LossScale.of(config.precision)
        super().__init__(
            make_model, plan, mesh, settings, activation if declared else None, loss, scale, stop or Stop()
        )
        self.config = config
        rule, axes = update_rule(config.optimizer, plan.width), self.parallelism.sharding_axes
        layers, weights = self.arithmetic.layers, self.model.weights
        self.optimizer = Optimizer(rule, weights, self.gradients, config.optimizer, plan, axes, layers)

    def fingerprint(self, step: int) -> str | None:
        """Hash the weights after a step, if they have the same bits in every layout. Collective over the world."""
        return self.arithmetic.fingerprint(self.model.weights, step)

    def train_step(self, batch: Any, step: int) -> StepResult:
        """Make one update from a global batch; see `compute_gradients` and `update`."""
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
            step: 0 for the first; determines the learning rate.
            refuses: returns why a step with this loss and norm, both finite, must not update; empty to update.

        Raises:
            NonFiniteStep: the loss or the norm is not finite, and no smaller loss scale could help.
        """
        assert self._batch is not None
        self.mesh.heartbeat.activity(Activity.UPDATE)
        # 4. Loss and norm, equal on every rank, so all ranks make the same decision.
        loss, norm, terms = self._loss_and_norm(local_loss)
        config, used = self.config.optimizer, None if self.loss_scale is None else self.scale
        lr, batch = learning_rate(step + 1, config), self._batch
        # 5. Clip and update.
        ending = self.end(
            norm,
            config.clip_grad_norm,
            lambda: self.optimizer.step(lr, step + 1),
            loss,
            refuses,
        )
        skipped, refused = not ending.updates, ending.refused
        result = StepResult(loss, norm, lr, tokens, batch.read, skipped, used, batch.padding, terms, refused)
        if not ending.goes_on:
            raise diverged(step, result, config.lr)  # not a local name, which its traceback would keep in a cycle
        return result

    def _loss_and_norm(self, loss: Tensor) -> tuple[float, float, dict[str, float]]:
        """Return the loss, the global gradient norm and the terms of the loss, in one all-reduce."""
        assert self._batch is not None
        sums = self._batch.sums
        losses = loss if self.mesh.tp.is_first else torch.zeros_like(loss)
        terms = [] if sums is None else [self._local_summands(each) for each in sums.values(self.mesh.device)]
        none = torch.zeros(0, dtype=torch.float64, device=self.mesh.device)
        summands = [losses, self.local_squares(), *terms]
        (mean, squared, *summed), _ = self.arithmetic.totals(summands, none, self._over_ranks)
        return mean, squared**0.5, {} if sums is None else several(sums.over_all(summed, 0).terms)


def several(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the terms of a loss; empty for a loss that is a single mean."""
    return {} if set(terms) <= {LOSS} else dict(terms)


def diverged(step: int, result: StepResult, lr: float) -> NonFiniteStep:
    """Return the error of a step, counted from 0, whose loss or gradients are not finite."""
    what = f"the loss is {result.loss:g} and the gradient norm {result.grad_norm:g}"
    advice = f"lower optimizer.lr ({lr:g}), to {lr / 2:g} say"
    error = NonFiniteStep(f"Training diverged at step {step + 1}: {what}; {advice}.")  # one argument: picklable
    error.what, error.advice, error.result = what, advice, result
    return error
