"""Tests of the tests: each known silent mistake, put back on purpose, must make the parity comparison fail.

The mistakes are those of training systems in use; the comment at each says where it hides.
"""

from collections.abc import Callable
from dataclasses import replace as changed

from tests.support.mistakes import (
    Patch,
    average_over_replicas_taken_twice,
    biases_decayed,
    column_input_gradient_not_summed,
    different_masks_in_the_replicated_region,
    dropout_keyed_by_the_rows_of_a_replica,
    last_micro_batch_dropped,
    layer_dropped,
    logged_loss_of_one_replica,
    logged_loss_of_the_first_stage,
    logged_loss_of_the_last_micro_batch,
    loss_summed_over_gathered_logits_twice,
    mean_of_means,
    norm_of_one_rank,
    replicas_not_reduced,
    replicas_reduced_before_the_last_micro_batch,
    replicated_parameters_counted_tp_times_in_the_norm,
    row_bias_added_by_every_rank,
    row_output_not_summed,
    same_mask_on_every_head_shard,
    shards_seeded_alike,
    tied_gradient_of_one_use_lost,
    tied_weight_counted_twice_in_the_norm,
    tied_weight_decayed_at_each_use,
    tied_weight_untied_by_splitting,
    weights_decayed_twice,
    weights_seeded_by_rank,
    with_mistake,
)
from tests.support.parity import Case, departures
from tests.support.sweep import sweep

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
        case = changed(case, shared_memory=False)
    found = departures(expected(case), pool.run(case.world_size, with_mistake, mistake, case), case)
    assert any(sign in departure for departure in found), found[:5]


@sweep("layout", [DP, TP, PP, ALL], ids=str, quick=(3,))
def test_without_a_mistake_nothing_is_found(pool, expected, layout: tuple[int, int, int]) -> None:
    case = Case(dtype="fp64", dropout=0.1).with_layout(*layout)
    assert not departures(expected(case), pool.run(case.world_size, with_mistake, list, case), case)
