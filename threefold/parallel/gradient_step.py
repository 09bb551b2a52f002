"""Gradients of a global batch's mean loss, equal in every layout: the core of every training loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from threefold.comm.heartbeat import Activity
from threefold.comm.mesh import Mesh
from threefold.constants import IGNORE_INDEX
from threefold.errors import UserError
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.layers.experts import Routing
from threefold.models.loss_terms import LOSS, LossFunction, LossSums, TermSums, count_terms
from threefold.models.module_check import explaining_passes
from threefold.models.own_batch import batch_shapes, batch_size, map_tensors
from threefold.models.sharding import ModelPlan
from threefold.parallel.moving_buffers import MovingBuffers
from threefold.parallel.parallelize import apply_parallelism
from threefold.parallel.parameter import has_uneven_shards, is_split
from threefold.parallel.pipeline.runner import LoopRunner, PipelineRunner, Runner
from threefold.parallel.pipeline.stage import LocalBatch, OwnBatch, Stage, StepSamples
from threefold.parallel.recompute import as_written
from threefold.parallel.sequence import sum_over_shares_
from threefold.parallel.settings import Parallelism, TrainingSettings
from threefold.random.dropout import Dropout, sample_keys
from threefold.random.rng import ProcessGenerators, generators_preserved
from threefold.torch_private.fake import FakeTensor


class TokenBatch(Protocol):
    """One replica's rows of a global batch of tokens, as `threefold.data.loader.Batch` has them."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def rows(self) -> Tensor: ...
    @property
    def documents(self) -> Tensor | None: ...
    @property
    def positions(self) -> Tensor | None: ...
    @property
    def padding(self) -> Tensor | None: ...


def tokens_and_labels(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return a token batch as (tokens, labels) for a user's loss; raise a `UserError` if documents are separated."""
    if batch.documents is not None:
        raise UserError(
            "data.separate_documents is true but a loss function of the user's comes with tokens and labels alone; use "
            "false."
        )
    return batch.tokens, batch.labels


class GradientStep:
    """A model sharded over a mesh, and the gradients of a global batch's mean loss.

    The last layer computes the loss of a batch of tokens and labels. Otherwise the loss is a function of the last
    layer's output and the batch, which is any nesting of tensors (`threefold.models.own_batch`,
    `threefold.models.loss_terms`).

    The constructor and all methods are collective over the world.

    Args:
        make_model: makes the whole, single-device model.
        activation: shape [b, S, H] of a micro-batch's activations between pipeline stages; None to find it at the first
            step.

    Attributes:
        model: this rank's part of the model, with its weights and gradients.
        buffers: persistent buffers, which forward passes may change.
        generators: random generators of this process, for user models that draw from them.

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
    ) -> None:
        self.mesh, self.plan, self.settings = mesh, plan, settings
        self.parallelism = Parallelism.make(plan, mesh, settings)
        self.model = apply_parallelism(make_model, plan, self.parallelism, settings)
        self.stages, self.gradients, self.streams = self.model.stages, self.model.gradients, self.model.streams
        self._in_order = any(has_uneven_shards(weight.parameter) for weight in self.model.weights)
        modules = self.model.modules()
        self._has_dropout = any(isinstance(module, Dropout) and module.p > 0 for module in modules)
        self._adds_losses = any(isinstance(module, Routing) and module.adds_losses for module in modules)
        self._padding = self._samples = 0
        self._is_first = True
        self._share = 1 / mesh.replicas.size
        self._sums: TermSums | None = None
        self.buffers = MovingBuffers(self.stages, plan, mesh)
        self.generators = ProcessGenerators(mesh.coordinates, mesh.device)
        self.runner = self._make_runner(activation)

    def _make_runner(self, activation: tuple[int, int, int] | None) -> Runner:
        count, pp = self.settings.micro_batches, self.mesh.pp.size
        if pp == 1:
            return LoopRunner(self.stages[0], count, self.mesh.heartbeat)
        schedule = self.settings.pipeline_schedule
        if not schedule.accepts(pp, count):
            raise UserError(
                f"micro_batches is {count} but the schedule {schedule.name} {schedule.micro_batch_rule(pp, count)}; "
                f"use {next(larger for larger in range(count, 4 * pp * count + 1) if schedule.accepts(pp, larger))}."
            )
        return PipelineRunner(self.stages, self.parallelism, schedule, count, activation, self.gradients.add_)

    def compute_gradients(
        self, batch: Any, step: int, loss: LossFunction | None = None, rows: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, int]:
        """Compute the gradients of the global batch's mean loss, accumulated over its micro-batches.

        Args:
            batch: this replica's samples of the global batch, the same on all ranks of the replica.
            step: number of the step, from 0; decides the dropout masks.
            loss: loss of the last layer's output; None for a `TokenBatch`, whose loss the last layer computes. With a
                loss, a `TokenBatch` is passed as (tokens, labels).
            rows: int64 [samples], index of each sample in the global batch; None if the replicas hold contiguous
                blocks, in the order of dp. A `TokenBatch` has its own.
            scale: loss scale: multiplies the loss in the backward pass, and divides the gradients afterwards.

        Returns:
            this replica's term of the mean loss (zero except on the last stage), and the number of valid tokens in the
            global batch, or of samples if it is not a `TokenBatch`.

        Raises:
            UserError: batch, model and loss do not fit together, or there is nothing to compute a loss of.
        """
        with self._explaining():
            local, counted, factor = self._samples_of(batch, step, loss, rows, scale)
            self.gradients.begin(self.runner.arrivals)
            self.buffers.begin()
            term = self.runner.forward_backward(local, factor)
            if self._is_first and self.plan.constructed:
                self._require_unchanged_weights()
            self._is_first = False
        self.mesh.heartbeat.activity(Activity.GRADIENT_SUM)
        self.gradients.finish()
        self.buffers.finish(self._share)
        self._sum_over_tensor_ranks()
        gradients = {weight.name: self.gradients[weight.leaf] for weight in self.model.trained}
        self.model.tied.sum_(gradients, self._in_order)
        if scale != 1:
            self.gradients.scale_(1 / scale)
        return term / scale, counted

    def train_batch(
        self, batch: Any, step: int, loss: LossFunction | None = None, rows: Tensor | None = None, scale: float = 1.0
    ) -> LossSums:
        """Compute the gradients as `compute_gradients` does; return the loss and its terms, equal on every rank."""
        term, counted = self.compute_gradients(batch, step, loss, rows, scale)
        if self._sums is not None:
            return self._summed(self._sums, self._samples)
        (total,) = self._sum_over_ranks(self._own_summands(term.double().view(1) * counted))
        return _of_tokens(total, counted, len(batch.labels) * self.mesh.dp.size)

    def eval_batch(self, batch: Any, loss: LossFunction | None = None) -> LossSums:
        """Return the loss of a global batch in evaluation mode; gradients and random states stay unchanged.

        There is no dropout, and experts drop no tokens, whatever their capacity. The loss and its terms are equal on
        every rank; those of several batches can be added. See `compute_gradients` for arguments and errors.
        """
        with self.preserved(), _in_evaluation_mode(self.stages), as_written(self.settings.compile):
            if loss is not None:
                local, counted, _ = self._own_samples(batch, loss, None, None)
                self.runner.evaluate(local)
                return self._summed(local.loss, counted)
            tokens = self._local_batch(batch)
            self._prepare(tokens)
            total = self.runner.evaluate(tokens).double()
        totals = torch.stack([total, (tokens.labels != IGNORE_INDEX).sum().to(total)])
        summed, count = self._sum_over_ranks(self._own_summands(totals))
        return _of_tokens(summed, int(count), len(batch.labels) * self.mesh.dp.size)

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

    def _explaining(self) -> AbstractContextManager[None]:
        """Explain common errors of a user's own layers in the block."""
        return explaining_passes(self.stages, self.mesh.tp.size) if self.plan.constructed else nullcontext()

    def _samples_of(
        self, batch: Any, step: int, loss: LossFunction | None, rows: Tensor | None, scale: float
    ) -> tuple[StepSamples, int, float]:
        """Return this rank's samples, the global count, and the factor of each micro-batch's loss."""
        if loss is not None:
            local, counted, self._sums = self._own_samples(batch, loss, rows, step)
            self._samples = counted
            self._share = batch_size(local.data) / counted / self.mesh.cp.size
            if _is_of_tokens(batch):
                counted, self._padding = self._count(batch)
            return local, counted, scale
        self._sums = None
        if not _is_of_tokens(batch):
            raise UserError(
                f"The batch is a {type(batch).__name__} without tokens and labels, and there is no loss; give the loss "
                "as a function of the last layer's output and the batch."
            )
        tokens, self._padding = self._count(batch)
        if tokens == 0:
            raise UserError(f"All labels of the batch of step {step + 1} are masked; check data.path.")
        keys = sample_keys(self.settings.seed, step, batch.rows) if self._has_dropout else None
        weights = (batch.labels != IGNORE_INDEX).double() * (scale / tokens) if self._adds_losses else None
        of_tokens = self._local_batch(batch, keys, weights)
        self._prepare(of_tokens)
        return of_tokens, tokens, scale / tokens

    def _prepare(self, local: StepSamples) -> None:
        if not self.runner.knows(local.shapes):
            self._find_shapes(local)

    def _find_shapes(self, local: StepSamples) -> None:
        with self.preserved(), as_written(self.settings.compile):
            self.runner.prepare(local)

    @contextmanager
    def preserved(self, streams: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Restore random streams, generators and buffers after the block, which starts with `streams` if given."""
        with self.streams.preserved(streams), generators_preserved(self.mesh.device), self.buffers.preserved():
            yield

    def _own_samples(
        self, batch: Any, loss: LossFunction, rows: Tensor | None, step: int | None
    ) -> tuple[OwnBatch, int, TermSums]:
        """Return this rank's samples of a user's own batch, the global number of samples, and the loss sums."""
        check_whole_sequences(self.mesh.cp.size, self.settings.sequence_parallel)
        if _is_of_tokens(batch):
            rows, batch = batch.rows, tokens_and_labels(batch)
        size = batch_size(batch)
        data = map_tensors(batch, lambda tensor: tensor.to(self.mesh.device, non_blocking=True))
        mine = count_terms(loss, data, size)
        unknown, sizes, counts = self._exchange_counts(not self.runner.knows(batch_shapes(data)), size, mine)
        if not any(counts.values()):
            raise UserError(
                f"The loss counts nothing in the global batch ({', '.join(counts)}); give it other samples."
            )
        keys = None
        if step is not None and self._has_dropout:
            if rows is None:
                rows = torch.arange(size) + sum(sizes[: self.mesh.dp.index])
            keys = sample_keys(self.settings.seed, step, rows).to(self.mesh.device, non_blocking=True)
        samples = NOTHING if keys is None else SampleInfo(keys)
        local = OwnBatch(data, TermSums(loss, counts), self.settings.dtype, samples)
        if unknown:
            # On all replicas at once: layers may communicate with other replicas.
            self._find_shapes(local)
        return local, sum(sizes), local.loss

    def _exchange_counts(
        self, unknown: bool, size: int, counts: Mapping[str, float]
    ) -> tuple[bool, list[int], dict[str, float]]:
        """Return whether any replica has samples of unknown shapes, the samples per replica, and the summed counts."""
        dp = self.mesh.dp
        sizes = [size if index == dp.index else 0 for index in range(dp.size)]
        summands = [float(unknown), *sizes, *counts.values()]
        totals = dp.all_reduce_values(torch.tensor(summands, dtype=torch.float64, device=self.mesh.device))
        summed = totals[1 + dp.size :]
        return totals[0] > 0, [int(each) for each in totals[1 : 1 + dp.size]], dict(zip(counts, summed, strict=True))

    def _summed(self, sums: TermSums, samples: int) -> LossSums:
        """Return the loss terms, summed over all ranks."""
        return sums.over_all(self._sum_over_ranks(self._own_summands(sums.values(self.mesh.device))), samples)

    def _own_summands(self, totals: Tensor) -> Tensor:
        """Return this rank's summands: zero except on the first tensor rank of the last stage."""
        return totals if self.runner.has_loss and self.mesh.tp.is_first else torch.zeros_like(totals)

    def _sum_over_ranks(self, totals: Tensor) -> list[float]:
        return self.mesh.world.all_reduce_values(totals)

    def _sum_over_tensor_ranks(self) -> None:
        """All-reduce gradients of weights that tensor ranks hold whole but use on their own positions or heads."""
        if self.mesh.tp.size == 1:
            return
        partial = [
            self.gradients[weight.leaf]
            for weight in self.model.trained
            if not is_split(weight.parameter)
            and (self.parallelism.sequence_parallel or self.plan.has_partial_gradient(weight.name))
        ]
        if partial:
            sum_over_shares_(partial, self.mesh.tp)

    def _count(self, batch: TokenBatch) -> tuple[int, int]:
        """Count the valid tokens and the padding of the global batch, from this replica's rows."""
        valid = (batch.labels != IGNORE_INDEX).sum()
        counts = torch.stack([valid, torch.zeros_like(valid) if batch.padding is None else batch.padding.sum()])
        valid, padding = self.mesh.dp.all_reduce_values(counts)
        return valid, padding

    def _local_batch(self, batch: TokenBatch, keys: Tensor | None = None, weights: Tensor | None = None) -> LocalBatch:
        """Return this rank's positions of every sequence, copied to its device without blocking the host."""
        device = self.mesh.device
        tokens, labels = (each.to(device, non_blocking=True) for each in (batch.tokens, batch.labels))
        cut = self.parallelism.context.cut.across_context
        if cut.shares > 1:
            held = cut.indices(tokens.shape[1] // cut.shares, device)
            tokens, labels = tokens[:, held], labels[:, held]
        keys, weights, positions = (
            None if fact is None else fact.to(device, non_blocking=True) for fact in (keys, weights, batch.positions)
        )
        return LocalBatch(tokens, labels, SampleInfo(keys, batch.documents, weights, positions))


def check_whole_sequences(cp: int, sequence_parallel: bool) -> None:
    """Raise a `UserError` if a layout shards sequences, since a user's loss function needs whole ones."""
    if cp > 1 or sequence_parallel:
        setting = f"cp is {cp}" if cp > 1 else "sequence_parallel is true"
        raise UserError(
            f"{setting} but a loss function of the user's needs whole sequences; use "
            f"{'cp 1' if cp > 1 else 'sequence_parallel false'}."
        )


def _is_of_tokens(batch: Any) -> bool:
    """Return whether a batch is a `TokenBatch`; a `NamedTuple` with its fields is a user's own batch."""
    return isinstance(getattr(batch, "tokens", None), Tensor) and not isinstance(batch, tuple)


def _of_tokens(total: float, count: int, samples: int) -> LossSums:
    return LossSums({LOSS: total}, {LOSS: total}, {LOSS: count}, samples)


@contextmanager
def _in_evaluation_mode(stages: Sequence[Stage]) -> Iterator[None]:
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for stage in stages:
            stage.train()
        for module, mode in modes:  # a constructor may leave a part of its model in evaluation mode
            module.training = mode
