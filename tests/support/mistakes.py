"""Patches that reintroduce silent mistakes of training systems; a comment at each says where it hides."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from threefold.comm import axis as collectives
from threefold.comm.mesh import Axis
from threefold.constants import IGNORE_INDEX
from threefold.data.loader import Batch
from threefold.models.sharding import AttentionCore, Split
from threefold.parallel import parameter, shard_modules, tensor
from threefold.parallel.pipeline import runner, stage
from threefold.train import step as engine
from threefold.train import step_batch, update_rule

Patch = tuple[Any, str, Any]
"""Arguments of `patch.object`."""


def with_mistake(mistake: Callable[[], list[Patch]], call: Callable[..., Any], *args: Any) -> Any:
    """Call `call(*args)` with a mistake, as a rank of the pool, which a test cannot patch."""
    with patched(mistake()):
        return call(*args)


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(patch.object(*each))
        yield


def sharded_by(rule: type[Split], make: Callable[[Any, Any, Any], Any]) -> Patch:
    """Replace modules that have a rule by `make(rule, module, context)`."""
    table = shard_modules.SHARDINGS
    return shard_modules, "SHARDINGS", {**table, rule: table[rule]._replace(make=make)}


def column_input_gradient_not_summed() -> list[Patch]:
    return [(collectives._CopyTo, "backward", staticmethod(lambda ctx, grad: (grad, None)))]


def row_output_not_summed() -> list[Patch]:
    return [(tensor, "reduce_from", lambda x, axis: x)]


def row_bias_added_by_every_rank() -> list[Patch]:
    def forward(self: tensor.RowParallelLinear, x: Tensor) -> Tensor:
        return tensor.reduce_from(torch.nn.functional.linear(x, tensor.computed(self.weight), self.bias), self.axis)

    # The bias starts at zero, so only steps after the first update show it.
    return [(tensor.RowParallelLinear, "forward", forward)]


def shards_seeded_alike() -> list[Patch]:
    return [(parameter, "offset", lambda weight: (0,) * weight.dim())]


def mean_of_means() -> list[Patch]:
    def count(self: step_batch.BatchPreparation, batch: Batch) -> tuple[int, int]:
        return int((batch.labels != IGNORE_INDEX).sum()) * self.mesh.dp.size, 0

    return [(step_batch.BatchPreparation, "_count", count)]


def replicas_not_reduced() -> list[Patch]:
    return [(Axis, "start_all_reduce_", lambda self, flat: None)]


def layer_dropped() -> list[Patch]:
    forward = stage.Stage.forward

    def skip_one(self: stage.Stage, x: Tensor, labels: Any = None, samples: Any = ()) -> Tensor:
        names = tuple(name for name in self.layer_names if name != "blocks.1")
        with patch.object(self, "layer_names", names):
            return forward(self, x, labels, samples)

    return [(stage.Stage, "forward", skip_one)]


def tied_gradient_of_one_use_lost() -> list[Patch]:
    return [(stage.TiedWeights, "sum_", lambda self, gradients, in_order: None)]


def tied_weight_counted_twice_in_the_norm() -> list[Patch]:
    return [(stage.TiedWeights, "is_primary", lambda self, name: True)]


def logged_loss_of_one_replica() -> list[Patch]:
    both = engine.Engine._loss_and_norm

    def local(self: engine.Engine, local_loss: Tensor) -> tuple[float, float, dict[str, float]]:
        _, norm, terms = both(self, local_loss)
        return local_loss.item() * self.mesh.dp.size, norm, terms

    return [(engine.Engine, "_loss_and_norm", local)]


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
        (runner.LoopRunner, "forward_backward", looped),
        (runner.PipelineRunner, "_run_micro_batches", piped),
    ]


def _logged_loss_of(has_loss: Callable[[Axis], bool]) -> list[Patch]:
    both = engine.Engine._loss_and_norm

    def of_one_stage(self: engine.Engine, local_loss: Tensor) -> tuple[float, float, dict[str, float]]:
        return both(self, local_loss if has_loss(self.mesh.pp) else torch.zeros_like(local_loss))

    return [(engine.Engine, "_loss_and_norm", of_one_stage)]


def logged_loss_of_the_first_stage() -> list[Patch]:
    return _logged_loss_of(lambda pp: pp.is_first)


def logged_loss_of_the_last_rank() -> list[Patch]:
    """Log the loss of the last rank, which has the last stage unless the stages lie in a V."""
    return _logged_loss_of(lambda pp: pp.is_last)


def same_mask_on_every_head_shard() -> list[Patch]:
    return [sharded_by(AttentionCore, lambda rule, module, context: module)]


def biases_decayed() -> list[Patch]:
    return [(update_rule.Entry, "decays", True)]


def dropout_keyed_by_the_rows_of_a_replica() -> list[Patch]:
    keys = step_batch.sample_keys
    return [(step_batch, "sample_keys", lambda seed, step, rows: keys(seed, step, rows - rows[0]))]


def counts_of_one_replica() -> list[Patch]:
    exchange = step_batch.BatchPreparation._exchange_counts

    def own(self: step_batch.BatchPreparation, unknown: bool, size: int, counts: Any) -> Any:
        found = exchange(self, unknown, size, counts)
        return found[0], found[1], {name: count * self.mesh.dp.size for name, count in counts.items()}

    return [(step_batch.BatchPreparation, "_exchange_counts", own)]
