"""Evaluation: the loss of batches in evaluation mode.

`EvaluationStep` also builds, once, the parts that a training step shares with it: the sharded model and its runner.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.heartbeat import Activity
from threefold.comm.mesh import Mesh
from threefold.constants import IGNORE_INDEX
from threefold.data.loader import Loader
from threefold.errors import UserError
from threefold.models.loss_terms import LOSS, LossFunction, LossSums, TermSums
from threefold.models.sharding import ModelPlan
from threefold.ops.exact import from_digits, order_free_digits
from threefold.parallel.moving_buffers import MovingBuffers
from threefold.parallel.parallelize import Parallelism, TrainableModel, TrainingSettings, apply_parallelism
from threefold.parallel.pipeline.runner import LoopRunner, PipelineRunner, Runner
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.recompute import as_written
from threefold.random.rng import ProcessGenerators, generators_preserved
from threefold.train.callbacks.records import EvaluationRecord
from threefold.train.step_batch import BatchPreparation
from threefold.train.stop import Stop, sum_over_ranks


class EvaluationStep:
    """A model sharded over a mesh, built once, and the loss of a global batch in evaluation mode.

    The constructor and all methods are collective over the world.

    Args:
        make_model: makes the whole, single-device model.
        activation: shape [b, S, H] of a micro-batch's activations between pipeline stages; None to find it at the first
            step.
        loss: loss of the last layer's output, where a call gives none; None if the last layer computes it.
        stop: requests to end the run; every sum over the ranks adds them up. None without them.

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
        loss: LossFunction | None = None,
        stop: Stop | None = None,
    ) -> None:
        if loss is not None:
            settings = replace(settings, own_model=True)
        self.mesh, self.plan, self.settings, self.loss, self.stop = mesh, plan, settings, loss, stop
        self.parallelism = Parallelism.make(plan, mesh, settings)
        self.model = apply_parallelism(make_model, plan, self.parallelism, settings)
        self.stages, self.streams = self.model.stages, self.model.streams
        self.buffers = MovingBuffers(self.stages, plan, mesh)
        self.generators = ProcessGenerators(mesh.coordinates, mesh.device)
        self.runner = _make_runner(self.model, settings, activation)
        self._batches = BatchPreparation(self.model, settings, self.runner, self.preserved)

    def eval_batch(self, batch: Any, loss: LossFunction | None = None) -> LossSums:
        """Return the loss of a global batch in evaluation mode; gradients and random states stay unchanged.

        There is no dropout, and experts drop no tokens, whatever their capacity. The loss and its terms are equal on
        every rank; those of several batches can be added. See `GradientStep.compute_gradients` for
        arguments and errors.
        """
        loss = loss or self.loss
        with self.preserved(), _in_evaluation_mode(self.stages), as_written(self.settings.compile):
            if loss is not None:
                local, sizes = self._batches.own_samples(batch, loss)
                self.runner.evaluate(local)
                return self._summed(local.loss, sum(sizes))
            tokens = self._batches.local_batch(batch)
            losses = self.runner.evaluate(tokens)
        count = (tokens.labels != IGNORE_INDEX).sum().double().view(1)
        if self.settings.grain is None:
            totals = torch.cat([losses.sum().double().view(1), count])
            summed, counted = sum_over_ranks(self._own_summands(totals), self.mesh, self.stop)
        else:
            own, totals = self._once(self._own_summands(losses.double())), self._own_summands(count)
            (summed,), (counted,) = sum_exactly([own], totals, self.mesh, self.stop)
        return loss_of_tokens(summed, int(counted), len(batch.labels) * self.mesh.dp.size)

    def evaluate(self, batch: Any) -> tuple[float, int]:
        """Return the summed loss and the number of valid tokens of a global batch; gradients and random state are kept.

        For a user's loss with one term, return its sum and its count; with several terms, the mean times the number of
        samples, and that number. Experts drop no token, whatever their capacity, as in a trained model.
        """
        found = self.eval_batch(batch)
        if len(found.counts) > 1:
            return found.loss * found.samples, found.samples
        (name,) = found.counts
        return found.weighted[name], int(found.counts[name])

    def unknown_calls(self) -> list[str]:
        """Return functions not known to be exact that an exact run called on any rank. Collective over the world.

        Names returned by an earlier call are left out.
        """
        calls = self.parallelism.calls
        if calls is None:  # on all ranks
            return []
        return sorted({name for names in self.mesh.world.gather_objects(calls.take_new()) for name in names})

    @contextmanager
    def preserved(self, streams: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Restore random streams, generators and buffers after the block, which starts with `streams` if given."""
        with self.streams.preserved(streams), generators_preserved(self.mesh.device), self.buffers.preserved():
            yield

    def _summed(self, sums: TermSums, samples: int) -> LossSums:
        """Return the loss terms, summed over all ranks."""
        if self.settings.grain is not None:
            each, none = self._own_terms(sums), torch.zeros(0, dtype=torch.float64, device=self.mesh.device)
            return sums.over_all(sum_exactly(each, none, self.mesh, self.stop)[0], samples)
        summands = self._own_summands(sums.values(self.mesh.device))
        return sums.over_all(sum_over_ranks(summands, self.mesh, self.stop), samples)

    def _own_terms(self, sums: TermSums) -> list[Tensor]:
        """Return this rank's summand of each term of an exact run's loss."""
        return [self._own_summands(each) for each in sums.each(self.mesh.device)]

    def _own_summands(self, totals: Tensor) -> Tensor:
        """Return this rank's summands: zero except on the first tensor rank of the last stage."""
        return totals if self.runner.has_loss and self.mesh.tp.is_first else torch.zeros_like(totals)

    def _once(self, losses: Tensor) -> Tensor:
        """Return the losses of an exact run's leaves, zero except on one of the context ranks, which all have them."""
        return losses if self.mesh.cp.is_first else torch.zeros_like(losses)


def evaluate(engine: EvaluationStep, loader: Loader, batches: int, step: int) -> EvaluationRecord | None:
    """Return the mean loss over the first `batches` global batches of the validation part, the same on every rank.

    The batches are divided among the corpora of a mixture by their weights, and the loss is the weighted mean of the
    corpora's losses. Gradients and random state are unchanged. Collective over the world.

    Args:
        engine: model to evaluate.
        loader: loader of the validation samples, with the same number of batches on every rank.
        batches: maximum number of batches.
        step: updates made so far.

    Returns:
        the record; None if the run must end before all batches were seen (`engine.stop`).

    Raises:
        UserError: all labels of the batches are masked.
    """
    started = time.perf_counter()
    loss, tokens, by_corpus, terms = 0.0, 0, {}, dict[str, float]()
    for part, count in loader.eval_parts(batches):
        measured = _sums(engine, loader.eval_batches(count, part.samples), part.name)
        if measured is None:
            return None
        # Valid tokens, or the count of the only term; samples for several terms.
        (only, *others) = measured.counts.values()
        tokens += measured.samples if others else int(only)
        loss += part.weight * measured.loss
        by_corpus[part.name] = measured.loss
        for name, mean in several(measured.terms).items():
            terms[name] = terms.get(name, 0.0) + part.weight * mean
    seconds = time.perf_counter() - started
    return EvaluationRecord(step, loss, tokens, seconds, by_corpus if loader.is_mixture else {}, terms)


def unknown_calls_line(names: Sequence[str]) -> str:
    """Return a sentence that names the functions called by an exact run that are not known to be exact."""
    return (
        f"train.exact: not known to have the same bits in every layout: {', '.join(names)}. Layouts may differ by what "
        "these compute (docs/exact.md)."
    )


def several(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the terms of a loss; empty for a loss that is a single mean."""
    return {} if set(terms) <= {LOSS} else dict(terms)


def _sums(engine: EvaluationStep, batches: Iterator[Any], name: str) -> LossSums | None:
    """Sum the loss over batches; None if the run must end."""
    sums, heartbeat = LossSums(), engine.mesh.heartbeat
    heartbeat.activity(Activity.DATA)
    for batch in batches:
        sums = sums + engine.eval_batch(batch, engine.loss)
        heartbeat.activity(Activity.DATA)
        if engine.stop is not None and engine.stop.is_due:
            return None
    if not any(sums.counts.values()):
        of = f" of {name}" if name else ""
        raise UserError(
            f"All labels of the validation batches{of} are masked, as its documents are empty; prepare other data."
        )
    return sums


def _make_runner(model: TrainableModel, settings: TrainingSettings, activation: tuple[int, int, int] | None) -> Runner:
    mesh, count = model.parallelism.mesh, settings.micro_batches
    if mesh.pp.size == 1:
        return LoopRunner(model.stages[0], count, mesh.heartbeat, model.parallelism.order)
    schedule, pp = settings.pipeline_schedule, mesh.pp.size
    if not schedule.accepts(pp, count):
        raise UserError(
            f"micro_batches is {count} but the schedule {schedule.name} {schedule.micro_batch_rule(pp, count)}; "
            f"use {next(larger for larger in range(count, 4 * pp * count + 1) if schedule.accepts(pp, larger))}."
        )
    return PipelineRunner(model.stages, model.parallelism, schedule, count, activation, model.gradients.add_)


def sum_exactly(
    values: Sequence[Tensor], totals: Tensor, mesh: Mesh, stop: Stop | None
) -> tuple[list[float], list[float]]:
    """Sum all elements of tensors over all ranks, in a way that does not depend on the order of the additions.

    Args:
        values: fp64 [n] each; a rank may hold any number of the elements.
        totals: fp64 [m], numbers to sum as `sum_over_ranks` does, in the same collective.

    Returns:
        the sum of each tensor of `values`, and the sums of `totals`.
    """
    tops = torch.stack([torch.cat([each.abs(), each.new_zeros(1)]).amax() for each in values])
    tops = mesh.world.all_reduce_max_(tops)
    digits = torch.stack([order_free_digits(each, top) for each, top in zip(values, tops, strict=True)])
    shared = tops if mesh.world.is_first else torch.zeros_like(tops)  # read with the sums: on a GPU, reading waits
    found = sum_over_ranks(torch.cat([digits.T.flatten(), shared, totals]), mesh, stop)
    count, places = len(values), range(0, digits.numel(), len(values))
    tops_read = found[digits.numel() : digits.numel() + count]
    sums = [from_digits([found[at + each] for at in places], tops_read[each]) for each in range(count)]
    return sums, found[digits.numel() + count :]


def loss_of_tokens(total: float, count: int, samples: int) -> LossSums:
    """Return the sums of a loss that is the mean over `count` tokens, given their total."""
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
