"""Tests of the tests of sharded data parallelism: each known mistake, put back on purpose, must be found."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import Case, departures, in_layout
from threefold.comm.axis import Axis
from threefold.parallel import parameter as weights
from threefold.parallel import zero

pytestmark = pytest.mark.slow  # they test the tests; the quick run has those of the other two files


def average_over_replicas_taken_twice() -> list[Patch]:
    set_up = zero._set_up

    def averaging(module: nn.Module, axis: Axis, *compression: Any) -> None:
        set_up(module, axis, *compression)
        module.set_gradient_divide_factor(float(axis.size))  # type: ignore[operator]

    return [(zero, "_set_up", averaging)]


def last_micro_batch_not_reduced() -> list[Patch]:
    post_backward, seen = FSDPParamGroup.post_backward, Counter[FSDPParamGroup]()

    def without_the_second(self: FSDPParamGroup, *unused: Any) -> None:
        seen[self] += 1
        if seen[self] == 2:
            for parameter in self.fsdp_params:
                parameter.unsharded_param.grad = None
        post_backward(self, *unused)

    return [(FSDPParamGroup, "post_backward", without_the_second)]


def weights_gathered_before_the_update() -> list[Patch]:
    """Without letting go of them, the next step computes with the weights of the one before."""
    return [(FSDPParamGroup, "reshard", lambda self: None)]


def weights_used_before_their_gather_ends() -> list[Patch]:
    """A gather fills its buffer, which is empty until then, only when the next one starts."""
    gather, under_way = zero._AllGather.__call__, []

    def late(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        while under_way:
            under_way.pop()()
        output_tensor.zero_()
        under_way.append(partial(gather, self, output_tensor, input_tensor.clone(), group))

    return [(zero._AllGather, "__call__", late)]


def shards_counted_once_a_copy_in_the_norm() -> list[Patch]:
    return [(zero.ShardedGradients, "is_in_norm", lambda self, leaf: True)]


def shards_of_one_rank_counted_in_the_norm() -> list[Patch]:
    return [(zero.ShardedGradients, "is_in_norm", lambda self, leaf: self._zero.shards.is_first)]


def copies_not_summed() -> list[Patch]:
    return [(zero.ShardedGradients, "_sum_over_replicas", lambda self: None)]


def gradients_added_up_in_half_precision() -> list[Patch]:
    policy = zero.MixedPrecisionPolicy

    def narrow(**options: Any) -> Any:
        return policy(**{**options, "reduce_dtype": torch.bfloat16})

    return [(zero, "MixedPrecisionPolicy", narrow)]


def shards_drawn_alike() -> list[Patch]:
    return [(weights, "offset", lambda parameter: (0,) * parameter.dim())]


def replicas_cut_before_the_tensor_axis() -> list[Patch]:
    """The order in which a plain two-dimensional `DTensor` would be cut."""
    offset = weights.offset

    def other_order(parameter: Any) -> tuple[int, ...]:
        starts = list(offset(parameter))
        if len(getattr(parameter, "placements", ())) == 2 and parameter.placements[1].dim == 0:
            shard, tensor = parameter.device_mesh.get_coordinate()
            shards, tensors = parameter.device_mesh.shape
            starts[0] = (shard * tensors + tensor) * (parameter.shape[0] // (shards * tensors))
        return tuple(starts)

    return [(weights, "offset", other_order)]


MISTAKES = [
    (average_over_replicas_taken_twice, 1, {}, "grad"),
    (average_over_replicas_taken_twice, 3, {"pp": 2}, "grad"),
    (last_micro_batch_not_reduced, 2, {}, "grad"),
    (last_micro_batch_not_reduced, 3, {"pp": 2}, "grad"),
    (weights_gathered_before_the_update, 1, {}, "step 1 grad"),
    (weights_gathered_before_the_update, 3, {}, "step 1 grad"),
    (weights_used_before_their_gather_ends, 1, {}, "loss"),
    (weights_used_before_their_gather_ends, 3, {}, "step 0 loss"),
    (weights_used_before_their_gather_ends, 3, {"pp": 2}, "step 0 grad"),
    (shards_counted_once_a_copy_in_the_norm, 2, {"dp": 4, "shards": 2}, "norm"),
    (shards_of_one_rank_counted_in_the_norm, 1, {}, "norm"),
    (copies_not_summed, 2, {"dp": 4, "shards": 2}, "grad"),
    (gradients_added_up_in_half_precision, 1, {}, "grad"),
    (gradients_added_up_in_half_precision, 3, {}, "grad"),
    (shards_drawn_alike, 1, {}, "initial"),
    (replicas_cut_before_the_tensor_axis, 3, {"tp": 2}, "initial"),
]


@pytest.mark.parametrize(
    ("mistake", "stage", "changes", "sign"),
    MISTAKES,
    ids=[f"{mistake.__name__}-{stage}" for mistake, stage, _, _ in MISTAKES],
)
def test_mistake_is_found(
    pool, expected, mistake: Callable[[], list[Patch]], stage: int, changes: dict[str, int], sign: str
) -> None:
    axes = {"dp": 2, **changes}
    shards = axes.pop("shards", axes["dp"])
    case = Case(dtype="fp64", steps=2, settings=(("parallel.zero", stage), ("parallel.zero_shards", shards)), **axes)
    found = departures(expected(case), pool.run(case.world_size, with_mistake, mistake, in_layout, case), case)
    assert any(sign in departure for departure in found), found[:5]
