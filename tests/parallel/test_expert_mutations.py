"""Tests of the tests: silent mistakes of experts and shared heads, put back, must make the comparison fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.parallel.support import SHARED
from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import LLAMA, Case, departures, in_layout, over
from tests.support.sweep import sweep
from threefold.comm import mesh
from threefold.models.layers import experts as routing
from threefold.models.sharding import ModelPlan
from threefold.parallel import experts
from threefold.parallel.experts import ParallelRouting
from threefold.parallel.gradients import GradientBuckets, JoinedGradients


def experts_summed_over_all_replicas() -> list[Patch]:
    """Replicas that hold different experts add their gradients up."""
    planned = mesh.Mesh._experts
    return [(mesh.Mesh, "_experts", lambda self: planned(self)[:1])]


def experts_not_summed_over_copies() -> list[Patch]:
    start = GradientBuckets._start

    def others(self: GradientBuckets, bucket: Any) -> None:
        if self._axis.name == "expert copies":
            self._started += 1
        else:
            start(self, bucket)

    return [(GradientBuckets, "_start", others)]


def experts_counted_once_a_rank_in_the_norm() -> list[Patch]:
    return [(GradientBuckets, "is_in_norm", lambda self, leaf: True)]


def experts_of_first_rank_alone_in_the_norm() -> list[Patch]:
    return [(JoinedGradients, "is_in_norm", lambda self, leaf: self._parts[0].is_in_norm(leaf))]


def answers_sent_back_unsorted() -> list[Patch]:
    exchange = experts.all_to_all

    def unsorted(rows: Tensor, axis: Any, sent: list[int], received: list[int]) -> Tensor:
        return exchange(rows.flip(0), axis, sent, received)

    return [(experts, "all_to_all", unsorted)]


def capacity_of_a_ranks_own_positions() -> list[Patch]:
    """Each rank fills the experts with its own part of the sequence."""

    def own(self: ParallelRouting, chosen: Tensor) -> Tensor:
        settings = self.per_token, self.capacity_factor, self.normalize, self.aux_loss, self.z_loss
        return routing.Routing(self.experts, *settings)._taken(chosen)

    return [(ParallelRouting, "_taken", own)]


def balance_of_a_ranks_own_positions() -> list[Patch]:
    return [(ParallelRouting, "_sum_over_shares", lambda self, counts: counts)]


def auxiliary_losses_once_a_tensor_rank() -> list[Patch]:
    """Added inside the region where each tensor rank has a part of the gradient."""
    copy_to = experts.copy_to

    def late(x: Tensor, axis: Any) -> Tensor:
        return routing._WithLoss.apply(copy_to(x, axis), x.square().sum() * 1e-4)

    return [(experts, "copy_to", late)]


def auxiliary_losses_whole_in_each_micro_batch() -> list[Patch]:
    """Two micro-batches, each of which adds the loss of a whole batch."""
    losses = routing.Routing._losses
    return [(routing.Routing, "_losses", lambda self, *args: losses(self, *args) * 2)]


def auxiliary_losses_averaged_by_micro_batch() -> list[Patch]:
    """The mean of two micro-batches' means, whatever number of tokens counts in each."""
    losses = routing.Routing._losses

    def averaged(self: routing.Routing, logits: Tensor, chances: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return losses(self, logits, chances, chosen, weights / weights.sum() / 2)

    return [(routing.Routing, "_losses", averaged)]


def router_gets_a_part_of_its_gradient() -> list[Patch]:
    copy_to = experts.copy_to
    return [(experts, "copy_to", lambda x, axis: x if x.shape[-1] == 2 else copy_to(x, axis))]


def head_norms_not_summed() -> list[Patch]:
    return [(ModelPlan, "has_partial_gradient", lambda self, name: False)]


MISTAKES = [
    (experts_summed_over_all_replicas, over(2, 1, 1, ep=2), "grad"),
    (experts_not_summed_over_copies, over(4, 1, 1, ep=2), "grad"),
    (experts_counted_once_a_rank_in_the_norm, over(4, 1, 1, ep=2), "norm"),
    (experts_of_first_rank_alone_in_the_norm, over(4, 1, 1, ep=2), "norm"),
    (answers_sent_back_unsorted, over(2, 1, 1, ep=2), "loss"),
    (capacity_of_a_ranks_own_positions, over(1, 2, 1, *SHARED, cp=2), "loss"),
    (balance_of_a_ranks_own_positions, over(1, 1, 1, cp=2), "grad"),
    (auxiliary_losses_once_a_tensor_rank, over(1, 2, 1), "grad"),
    (auxiliary_losses_whole_in_each_micro_batch, over(1, 1, 1), "grad"),
    (auxiliary_losses_averaged_by_micro_batch, over(1, 1, 1), "grad"),
    (auxiliary_losses_averaged_by_micro_batch, over(1, 1, 2), "grad"),
    (router_gets_a_part_of_its_gradient, over(1, 2, 1), "grad blocks.1.mlp.router"),
    (head_norms_not_summed, LLAMA.with_layout(1, 2, 1), "norm.weight"),
]


@sweep(("mistake", "case", "sign"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""), quick=(0, 1))
def test_mistake_is_found(pool, expected, mistake: Callable[[], list[Patch]], case: Case, sign: str) -> None:
    case = replace(case, steps=1)
    found = departures(expected(case), pool.run(case.world_size, with_mistake, mistake, in_layout, case), case)
    assert any(sign in departure for departure in found), found[:5]
