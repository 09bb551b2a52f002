"""Tests of the tests: each known silent mistake, put back on purpose, must make the parity comparison fail.

The mistakes are those of training systems in use; the comment at each says where it hides.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tests.support.mistakes import (
    Patch,
    biases_decayed,
    column_input_gradient_not_summed,
    dropout_keyed_by_the_rows_of_a_replica,
    layer_dropped,
    logged_loss_of_one_replica,
    logged_loss_of_the_first_stage,
    logged_loss_of_the_last_micro_batch,
    mean_of_means,
    replicas_not_reduced,
    row_bias_added_by_every_rank,
    row_output_not_summed,
    same_mask_on_every_head_shard,
    shards_seeded_alike,
    tied_gradient_of_one_use_lost,
    tied_weight_counted_twice_in_the_norm,
    with_mistake,
)
from tests.support.parity import Case, departures, in_layout
from tests.support.sweep import sweep
from threefold.parallel import cross_entropy, parallelize, parameter
from threefold.parallel.gradients import GradientBuckets
from threefold.parallel.pipeline.stage import LocalBatch
from threefold.train import optim, step_batch
from threefold.train.optim import Optimizer
from threefold.train.step import Engine


def weights_seeded_by_rank() -> list[Patch]:
    draw = parameter.draw_

    def draw_by_rank(into: Tensor, weight: Tensor, name: str, plan: Any, seed: int, *more: Any) -> Tensor:
        return draw(into, weight, name, plan, seed + torch.distributed.get_rank(), *more)

    return [(parameter, "draw_", draw_by_rank)]


def average_over_replicas_taken_twice() -> list[Patch]:
    finish = GradientBuckets.finish

    def finish_and_average(self: GradientBuckets) -> None:
        finish(self)
        self.scale_(1 / self._axis.size)

    return [(GradientBuckets, "finish", finish_and_average)]


def replicas_reduced_before_the_last_micro_batch() -> list[Patch]:
    begin = GradientBuckets.begin
    return [(GradientBuckets, "begin", lambda self, micro_batches: begin(self, micro_batches - 1))]


def last_micro_batch_dropped() -> list[Patch]:
    split = LocalBatch.split
    return [(LocalBatch, "split", lambda self, parts: split(self, parts)[:-1])]


def tied_weight_untied_by_splitting() -> list[Patch]:
    def allocate_zeros(stages: Any, *rest: Any) -> None:
        """Allocate, with zeros for values: nothing initialises the second copy, and memory may hold a NaN."""
        allocate(stages, *rest)
        for each in chain.from_iterable(stage.parameters() for stage in stages):
            each.detach().zero_()

    allocate = parallelize._allocate
    return [(parallelize, "_further_uses", lambda stages: []), (parallelize, "_allocate", allocate_zeros)]


def replicated_parameters_counted_tp_times_in_the_norm() -> list[Patch]:
    return [(optim, "is_split", lambda parameter: True)]


def norm_of_one_rank() -> list[Patch]:
    def alone(self: Engine, local_loss: Tensor) -> tuple[float, float, dict[str, float]]:
        mean, _, terms = both(self, local_loss)
        return mean, float(self._norm.squared() ** 0.5), terms

    both = Engine._loss_and_norm
    return [(Engine, "_loss_and_norm", alone)]


def different_masks_in_the_replicated_region() -> list[Patch]:
    keys = step_batch.sample_keys
    return [(step_batch, "sample_keys", lambda seed, *rest: keys(seed + torch.distributed.get_rank(), *rest))]


def loss_summed_over_gathered_logits_twice() -> list[Patch]:
    all_reduce = cross_entropy.all_reduce
    return [(cross_entropy, "all_reduce", lambda values, axis: all_reduce(values, axis).mul_(axis.size))]


def weights_decayed_twice() -> list[Patch]:
    """Decay weights in torch's optimizer and once more before it."""
    update = Optimizer.step

    def decayed(self: Optimizer, lr: float) -> None:
        for entry in self.entries:
            entry.master.detach().mul_(1 - lr * self.rule.weight_decay(entry))
        update(self, lr)

    return [(Optimizer, "step", decayed)]


def tied_weight_decayed_at_each_use() -> list[Patch]:
    update = Optimizer.step

    def decayed(self: Optimizer, lr: float) -> None:
        for entry in self.entries:
            if entry.name == "embed.tokens.weight":
                entry.master.detach().mul_(1 - lr * self.rule.weight_decay(entry))
        update(self, lr)

    return [(Optimizer, "step", decayed)]


DP, TP, PP, ALL = (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)

MISTAKES = [
    (column_input_gradient_not_summed, TP, "grad"),
    (row_output_not_summed, TP, "loss"),
    (row_bias_added_by_every_rank, TP, "loss"),
    (shards_seeded_alike, TP, "initial"),
    (weights_seeded_by_rank, TP, "initial"),
    (weights_seeded_by_rank, PP, "initial"),
    (mean_of_means, DP, "grad"),
    (replicas_not_reduced, DP, "grad"),
    (average_over_replicas_taken_twice, DP, "grad"),
    (replicas_reduced_before_the_last_micro_batch, DP, "grad"),
    (last_micro_batch_dropped, (1, 1, 1), "grad"),
    (layer_dropped, PP, "grad"),
    (tied_gradient_of_one_use_lost, PP, "grad embed.tokens.weight"),
    (tied_weight_counted_twice_in_the_norm, PP, "norm"),
    (tied_weight_untied_by_splitting, TP, "grad embed.tokens.weight"),
    (replicated_parameters_counted_tp_times_in_the_norm, TP, "norm"),
    (norm_of_one_rank, ALL, "norm"),
    (logged_loss_of_one_replica, DP, "loss"),
    (dropout_keyed_by_the_rows_of_a_replica, DP, "grad"),
    (same_mask_on_every_head_shard, TP, "grad"),
    (different_masks_in_the_replicated_region, TP, "grad"),
    (loss_summed_over_gathered_logits_twice, TP, "loss"),
    (biases_decayed, (1, 1, 1), "final"),
    (weights_decayed_twice, (1, 1, 1), "final"),
    (tied_weight_decayed_at_each_use, (1, 1, 1), "final embed.tokens.weight"),
    (tied_weight_decayed_at_each_use, PP, "final embed.tokens.weight"),
    (logged_loss_of_the_last_micro_batch, (1, 1, 1), "loss"),
    (logged_loss_of_the_last_micro_batch, PP, "loss"),
    (logged_loss_of_the_first_stage, PP, "loss"),
]


@sweep(
    ("mistake", "layout", "sign"),
    MISTAKES,
    ids=[f"{mistake.__name__}-dp{dp}-tp{tp}-pp{pp}" for mistake, (dp, tp, pp), _ in MISTAKES],
    quick=(0, 3, 6, 10, 12, 16, 18),
)
def test_mistake_is_found(
    pool, expected, mistake: Callable[[], list[Patch]], layout: tuple[int, int, int], sign: str
) -> None:
    case = Case(dtype="fp64", dropout=0.1).with_layout(*layout)
    if mistake is replicas_reduced_before_the_last_micro_batch:  # ranks that share memory begin no sum before its end
        case = replace(case, shared_memory=False)
    found = departures(expected(case), pool.run(case.world_size, with_mistake, mistake, in_layout, case), case)
    assert any(sign in departure for departure in found), found[:5]


@sweep("layout", [DP, TP, PP, ALL], ids=str, quick=(3,))
def test_without_a_mistake_nothing_is_found(pool, expected, layout: tuple[int, int, int]) -> None:
    case = Case(dtype="fp64", dropout=0.1).with_layout(*layout)
    assert not departures(expected(case), pool.run(case.world_size, with_mistake, list, in_layout, case), case)
