"""A rank's samples of a global batch, and the counts by which the replicas divide its loss."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threefold.constants import IGNORE_INDEX
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.models.custom_batch import batch_shapes, batch_size, map_tensors
from threefold.models.layers.decoder import NOTHING, SampleInfo, TermsHead
from threefold.models.layers.experts import Routing
from threefold.models.layers.prediction import PredictingHead, look_ahead
from threefold.models.loss_terms import LossFunction, LossTerm, TermSums, count_terms
from threefold.parallel.context import check_whole_sequences
from threefold.parallel.parallelize import TrainableModel, TrainingSettings
from threefold.parallel.pipeline.runner import Runner
from threefold.parallel.pipeline.stage import CustomBatch, LocalBatch, StepSamples
from threefold.parallel.recompute import as_written
from threefold.parallel.shard_modules import Extended
from threefold.random.dropout import Dropout, sample_keys


class BatchFacts(NamedTuple):
    """Facts of a step's global batch, which outlive the samples.

    Attributes:
        counted, read: valid tokens, and tokens without padding; samples for both if the batch has no tokens.
        factor: factor of a micro-batch's summed loss in the backward pass: one over the valid tokens, or the pairs, of
            the global batch, times the loss scale.
        fraction: of the global batch's samples, those that this rank computes, for means over them.
        sums: terms of the loss, added up as micro-batches run; None if the last layer computes a single mean.
    """

    counted: int
    factor: float
    fraction: float
    samples: int
    padding: int
    read: int
    sums: TermSums | None = None


class BatchPreparation:
    """Preparation of each step's batch on a rank: its counts, the rank's part of it, and its dropout keys.

    Methods are collective over dp. While shapes of activations are unknown, they are collective over the world: the
    `runner` finds the shapes inside `preserved`, a context that restores random states and buffers at its end.
    """

    def __init__(
        self,
        model: TrainableModel,
        settings: TrainingSettings,
        runner: Runner,
        preserved: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.mesh, self.settings, self._runner, self._preserved = model.parallelism.mesh, settings, runner, preserved
        self.positions = model.parallelism.context.cut.across_context
        self._arithmetic, modules = model.parallelism.arithmetic, model.modules()
        self._has_dropout = any(
            (isinstance(module, Dropout) and module.p > 0) or (isinstance(module, Extended) and module.drops)
            for module in modules
        )
        self._terms, self._of_pairs = model.plan.terms, model.plan.of_pairs
        self._heads = [each for each in modules if isinstance(each, TermsHead)]
        self._weighs_tokens = any(isinstance(module, Routing) and module.weighs_tokens for module in modules)

    def of_tokens(self, batch: Any, step: int, scale: float) -> tuple[LocalBatch, BatchFacts]:
        """Prepare a batch of tokens, whose loss the last layer computes, for a step with the loss scale `scale`."""
        if not is_of_tokens(batch):
            raise UserError(
                f"The batch is a {type(batch).__name__} without tokens and labels, and there is no loss; give the loss "
                "as a function of the last layer's output and the batch."
            )
        tokens, padding, items = self._count(batch)
        if tokens == 0:
            raise UserError(f"All labels of the batch of step {step + 1} are masked; check data.path.")
        keys = sample_keys(self.settings.seed, step, batch.rows) if self._has_dropout else None
        weights = (batch.labels != IGNORE_INDEX).double() * (scale / tokens) if self._weighs_tokens else None
        local = self.local_batch(batch, keys, weights)
        samples = len(batch.labels) * self.mesh.dp.size
        read = samples * batch.labels.shape[1] - padding
        sums = TermSums(None, dict.fromkeys(self._terms, float(items))) if self._terms else None
        return local, BatchFacts(tokens, scale / items, 1 / self.mesh.replicas.size, samples, padding, read, sums)

    def take_terms(self, sums: TermSums | None = None) -> None:
        """Add the terms of the loss that this rank's head has computed to `sums`, or forget them."""
        for sum_of_each in (each for head in self._heads for each in head.take_terms()):
            for (name, weight), term in zip(self._terms.items(), sum_of_each, strict=True):
                if sums is not None:
                    sums.add(name, LossTerm(term, weight))

    def evaluated_terms(self, batch: Batch) -> TermSums:
        """Return the terms of the loss that this rank's head has computed in an evaluation."""
        sums = TermSums(None, dict.fromkeys(self._terms, float(self._count(batch)[2])))
        self.take_terms(sums)
        return sums

    def _count(self, batch: Batch) -> tuple[int, int, int]:
        """Count the valid tokens, the padding and what the loss is a mean over in the global batch.

        They are counted from this replica's rows.
        """
        valid = (batch.labels != IGNORE_INDEX).sum()
        of_pairs = [(batch.labels != IGNORE_INDEX).any(1).sum()] if self._of_pairs else []
        padding = torch.zeros_like(valid) if batch.padding is None else batch.padding.sum()
        counts = torch.stack([valid, padding, *of_pairs])
        valid, padding, *pairs = self.mesh.dp.all_reduce_values(counts)
        return valid, padding, pairs[0] if pairs else valid

    def local_batch(self, batch: Batch, keys: Tensor | None = None, weights: Tensor | None = None) -> LocalBatch:
        """Return this rank's positions of every sequence, copied to its device without blocking the host."""
        device = self.mesh.device
        tokens, labels = (each.to(device, non_blocking=True) for each in (batch.tokens, batch.labels))
        held = None
        if self.mesh.cp.size > 1:
            held = self.positions.indices(tokens.shape[1] // self.positions.shares, device)
            tokens, labels = tokens[:, held], labels[:, held]
        samples = SampleInfo(keys, batch.documents, weights, batch.positions)
        if self._of_pairs:
            sides = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
            samples = samples._replace(sides=sides, pairs=pairs_of(batch, sides))
        for head in (each for each in self._heads if isinstance(each, PredictingHead) and each.training):
            samples = look_ahead(samples, batch.tokens, batch.labels, len(head.depths))
        facts = {
            name: fact.to(device, non_blocking=True)
            for name, fact in samples._asdict().items()
            if fact is not None and name != "documents"
        }
        if held is not None and "ahead" in facts:
            facts["ahead"] = facts["ahead"][..., held]
        if held is not None and "sides" in facts:
            facts["sides"] = facts["sides"][:, held]
        local = LocalBatch(tokens, labels, samples._replace(**facts))
        if not self._runner.knows(local.shapes):
            self._find_shapes(local)
        return local

    def of_custom(
        self,
        batch: Any,
        step: int,
        loss: LossFunction,
        rows: Tensor | None,
        scale: float,
        outputs: dict[int, Any] | None = None,
    ) -> tuple[CustomBatch, BatchFacts]:
        """Prepare a batch whose loss is `loss` of the last layer's output."""
        local, sizes = self.custom_samples(batch, loss, step, rows, outputs)
        samples = sum(sizes)
        fraction = batch_size(local.data) / samples / self.mesh.cp.size
        counted, padding, length = samples, 0, 1
        if is_of_tokens(batch):
            (counted, padding, _), length = self._count(batch), batch.labels.shape[1]
        return local, BatchFacts(counted, scale, fraction, samples, padding, samples * length - padding, local.loss)

    def custom_samples(
        self,
        batch: Any,
        loss: LossFunction,
        step: int | None = None,
        rows: Tensor | None = None,
        outputs: dict[int, Any] | None = None,
    ) -> tuple[CustomBatch, list[int]]:
        """Return this rank's samples of a custom batch, with dropout keys of `step`, and the samples per replica.

        `outputs` collects the last layer's outputs, by the number of the micro-batch.
        """
        check_whole_sequences(self.mesh.cp.size, self.settings.parallel.sequence_parallel)
        if is_of_tokens(batch):
            if batch.documents is not None:
                raise UserError(
                    "data.separate_documents is true but a loss function of the user's comes with tokens and labels "
                    "alone; use false."
                )
            rows, batch = batch.rows, (batch.tokens, batch.labels)
        size = batch_size(batch)
        data = map_tensors(batch, lambda tensor: tensor.to(self.mesh.device, non_blocking=True))
        mine = count_terms(loss, data, size)
        if not all(count.is_integer() for count in mine.values()):
            self._arithmetic.note("counts of the loss that are not whole numbers")
        unknown, sizes, counts = self._exchange_counts(not self._runner.knows(batch_shapes(data)), size, mine)
        if not any(counts.values()):
            raise UserError(
                f"The loss counts nothing in the global batch ({', '.join(counts)}); give it other samples."
            )
        samples = NOTHING
        if step is not None and self._has_dropout:
            if rows is None:
                rows = torch.arange(size) + sum(sizes[: self.mesh.dp.index])
            keys = sample_keys(self.settings.seed, step, rows)
            samples = SampleInfo(keys.to(self.mesh.device, non_blocking=True))
        local = CustomBatch(data, TermSums(loss, counts), self.settings.dtype, samples, outputs)
        if unknown:  # on all replicas at once: layers may communicate with other replicas
            self._find_shapes(local)
        return local, sizes

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

    def _find_shapes(self, local: StepSamples) -> None:
        with self._preserved(), as_written(self.settings.compile):
            self._runner.prepare(local)


def pairs_of(batch: Batch, sides: Tensor) -> Tensor:
    """Return facts about each pair of a replica's rows, fp64 [rows, 4 or 6], on the host.

    They are the row in the global batch, whether the pair counts, and the labels of the chosen and of the rejected
    document; then their reference log-probabilities, if they are known.
    """
    has_label = batch.labels != IGNORE_INDEX
    counts = [batch.rows, has_label.any(1), *((has_label & (sides == side)).sum(1) for side in (0, 1))]
    facts = torch.stack([each.double() for each in counts], 1)
    return facts if batch.references is None else torch.cat((facts, batch.references), 1)


def is_of_tokens(batch: Any) -> bool:
    """Return whether a batch is a `Batch`; a `NamedTuple` with its fields is a custom batch."""
    return isinstance(getattr(batch, "tokens", None), Tensor) and not isinstance(batch, tuple)
