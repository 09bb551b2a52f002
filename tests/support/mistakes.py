"""Patches that reintroduce silent mistakes of training systems; a comment at each says where it hides."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support.parity import Case, Trace, in_layout
from threefold.comm import reductions as collectives
from threefold.comm.mesh import Axis
from threefold.constants import IGNORE_INDEX
from threefold.data.loader import Batch
from threefold.models.sharding import AttentionCore, Split
from threefold.parallel import cross_entropy as loss
from threefold.parallel import gradients as data
from threefold.parallel import parallelize, shard_modules, tensor
from threefold.parallel import parameter as weights
from threefold.parallel.pipeline import runner, stage
from threefold.parallel.pipeline import stage as tied
from threefold.train import optim as optimizer
from threefold.train import step as engine
from threefold.train import step_batch

Patch = tuple[Any, str, Any]


def replace(owner: Any, name: str, new: Any) -> Patch:
    return owner, name, new


def sharded_by(rule: type[Split], make: Callable[[Any, Any, Any], Any]) -> Patch:
    """Replace modules that have a rule by `make(rule, module, context)`."""
    table = shard_modules.SHARDINGS
    return replace(shard_modules, "SHARDINGS", {**table, rule: table[rule]._replace(make=make)})


def column_input_gradient_not_summed() -> list[Patch]:
    return [replace(collectives._CopyTo, "backward", staticmethod(lambda ctx, grad: (grad, None)))]


def row_output_not_summed() -> list[Patch]:
    return [replace(tensor, "reduce_from", lambda x, axis: x)]


def row_bias_added_by_every_rank() -> list[Patch]:
    def forward(self: tensor.RowParallelLinear, x: Tensor) -> Tensor:
        return tensor.reduce_from(torch.nn.functional.linear(x, tensor.local(self.weight), self.bias), self.axis)

    # The bias starts at zero, so only steps after the first update show it.
    return [replace(tensor.RowParallelLinear, "forward", forward)]


def shards_seeded_alike() -> list[Patch]:
    return [replace(weights, "offset", lambda parameter: (0,) * parameter.dim())]


def weights_seeded_by_rank() -> list[Patch]:
    draw = weights.draw_

    def draw_by_rank(into: Tensor, parameter: Tensor, name: str, plan: Any, seed: int, *more: Any) -> Tensor:
        return draw(into, parameter, name, plan, seed + torch.distributed.get_rank(), *more)

    return [replace(weights, "draw_", draw_by_rank)]


def mean_of_means() -> list[Patch]:
    def count(self: step_batch.BatchPreparation, batch: Batch) -> tuple[int, int]:
        return int((batch.labels != IGNORE_INDEX).sum()) * self.mesh.dp.size, 0

    return [replace(step_batch.BatchPreparation, "_count", count)]


def replicas_not_reduced() -> list[Patch]:
    return [replace(Axis, "start_all_reduce_", lambda self, flat: None)]


def average_over_replicas_taken_twice() -> list[Patch]:
    finish = data.GradientBuckets.finish

    def finish_and_average(self: data.GradientBuckets) -> None:
        finish(self)
        self.scale_(1 / self._axis.size)

    return [replace(data.GradientBuckets, "finish", finish_and_average)]


def replicas_reduced_before_the_last_micro_batch() -> list[Patch]:
    begin = data.GradientBuckets.begin
    return [replace(data.GradientBuckets, "begin", lambda self, micro_batches: begin(self, micro_batches - 1))]


def last_micro_batch_dropped() -> list[Patch]:
    split = stage.LocalBatch.split
    return [replace(stage.LocalBatch, "split", lambda self, parts: split(self, parts)[:-1])]


def layer_dropped() -> list[Patch]:
    forward = stage.Stage.forward

    def skip_one(self: stage.Stage, x: Tensor, labels: Any = None, samples: Any = ()) -> Tensor:
        names = tuple(name for name in self.layer_names if name != "blocks.1")
        with patch.object(self, "layer_names", names):
            return forward(self, x, labels, samples)

    return [replace(stage.Stage, "forward", skip_one)]


def tied_gradient_of_one_use_lost() -> list[Patch]:
    return [replace(tied.TiedWeights, "sum_", lambda self, gradients, in_order: None)]


def tied_weight_counted_twice_in_the_norm() -> list[Patch]:
    return [replace(tied.TiedWeights, "is_primary", lambda self, name: True)]


def tied_weight_untied_by_splitting() -> list[Patch]:
    return [replace(parallelize, "_tie", lambda stages, plan: None)]


def replicated_parameters_counted_tp_times_in_the_norm() -> list[Patch]:
    return [replace(engine, "is_split", lambda parameter: True)]


def norm_of_one_rank() -> list[Patch]:
    def alone(self: engine.Engine, local_loss: Tensor) -> tuple[float, float, dict[str, float]]:
        mean, _, terms = both(self, local_loss)
        return mean, float(self._norm.squared() ** 0.5), terms

    both = engine.Engine._loss_and_norm
    return [replace(engine.Engine, "_loss_and_norm", alone)]


def logged_loss_of_one_replica() -> list[Patch]:
    both = engine.Engine._loss_and_norm

    def local(self: engine.Engine, local_loss: Tensor) -> tuple[float, float, dict[str, float]]:
        _, norm, terms = both(self, local_loss)
        return local_loss.item() * self.mesh.dp.size, norm, terms

    return [replace(engine.Engine, "_loss_and_norm", local)]


def logged_loss_of_the_last_micro_batch() -> list[Patch]:
    def looped(self: runner.LoopRunner, batch: stage.LocalBatch, scale: float) -> Tensor:
        for micro in batch.split(self.micro_batches):
            last = self.stage(micro.tokens, micro.labels, micro.samples) * scale
            last.backward()
        return last.detach() * self.micro_batches

    def piped(self: runner.PipelineRunner, run: Any, batch: stage.LocalBatch, scale: float) -> Tensor:
        def keep_last(*args: Any, losses: list[Tensor], **options: Any) -> None:
            run(*args, losses=losses, **options)
            losses[:] = losses[-1:] * len(losses)

        return loss_of(self, keep_last, batch, scale)

    loss_of = runner.PipelineRunner._run_micro_batches
    return [
        replace(runner.LoopRunner, "forward_backward", looped),
        replace(runner.PipelineRunner, "_run_micro_batches", piped),
    ]


def _logged_loss_of(has_loss: Callable[[Axis], bool]) -> list[Patch]:
    both = engine.Engine._loss_and_norm

    def of_one_stage(self: engine.Engine, local_loss: Tensor) -> tuple[float, float, dict[str, float]]:
        return both(self, local_loss if has_loss(self.mesh.pp) else torch.zeros_like(local_loss))

    return [replace(engine.Engine, "_loss_and_norm", of_one_stage)]


def logged_loss_of_the_first_stage() -> list[Patch]:
    return _logged_loss_of(lambda pp: pp.is_first)


def logged_loss_of_the_last_rank() -> list[Patch]:
    """Log the loss of the last rank, which has the last stage unless the stages lie in a V."""
    return _logged_loss_of(lambda pp: pp.is_last)


def dropout_keyed_by_the_rows_of_a_replica() -> list[Patch]:
    keys = step_batch.sample_keys
    return [replace(step_batch, "sample_keys", lambda seed, step, rows: keys(seed, step, rows - rows[0]))]


def same_mask_on_every_head_shard() -> list[Patch]:
    return [sharded_by(AttentionCore, lambda rule, module, context: module)]


def different_masks_in_the_replicated_region() -> list[Patch]:
    keys = step_batch.sample_keys
    return [
        replace(step_batch, "sample_keys", lambda seed, *rest: keys(seed + torch.distributed.get_rank(), *rest)),
    ]


def loss_summed_over_gathered_logits_twice() -> list[Patch]:
    all_reduce = loss.all_reduce
    return [replace(loss, "all_reduce", lambda values, axis: all_reduce(values, axis).mul_(axis.size))]


def biases_decayed() -> list[Patch]:
    return [replace(optimizer.Entry, "decays", True)]


def weights_decayed_twice() -> list[Patch]:
    """Decay weights in torch's optimizer and once more before it."""
    step = optimizer.Optimizer.step

    def decayed(self: optimizer.Optimizer, lr: float) -> None:
        for entry in self.entries:
            entry.master.detach().mul_(1 - lr * self.rule.weight_decay(entry))
        step(self, lr)

    return [replace(optimizer.Optimizer, "step", decayed)]


def tied_weight_decayed_at_each_use() -> list[Patch]:
    step = optimizer.Optimizer.step

    def decayed(self: optimizer.Optimizer, lr: float) -> None:
        for entry in self.entries:
            if entry.name == "embed.tokens.weight":
                entry.master.detach().mul_(1 - lr * self.rule.weight_decay(entry))
        step(self, lr)

    return [replace(optimizer.Optimizer, "step", decayed)]


def with_patches(patches: list[Patch], call: Callable[..., Any], *args: Any) -> Any:
    with patched(patches):
        return call(*args)


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(patch.object(*each))
        yield


def with_mistake(mistake: Callable[[], list[Patch]], case: Case) -> Trace:
    return with_patches(mistake(), in_layout, case)
