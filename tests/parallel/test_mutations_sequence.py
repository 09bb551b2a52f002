"""Tests of the tests: the known silent mistakes of sequence parallelism, put back, must make the comparison fail."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from tests.parallel.support import shared
from tests.support.mistakes import Patch, sharded_by, with_mistake
from tests.support.parity import Case, departures, in_layout
from threefold.comm import axis as collectives
from threefold.comm.axis import Axis
from threefold.models.layers.decoder import PositionEmbedding
from threefold.models.sharding import OverSequence
from threefold.ops.kernels import linear
from threefold.parallel import tensor
from threefold.parallel.context import ShardingContext
from threefold.parallel.leaf import local
from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import is_split
from threefold.parallel.shard_modules import SHARDINGS
from threefold.random.dropout import Dropout
from threefold.random.rng import Slice
from threefold.train import step as engine

pytestmark = pytest.mark.slow  # they test the tests; the quick run has those of the other two files


def _summed_only(matches: Callable[[str], bool]) -> list[Patch]:
    """Only the gradients of the weights that match are summed over the shares."""

    def some(model: TrainableModel) -> list[Tensor]:
        return [weight.leaf for weight in model.trained if not is_split(weight.parameter) and matches(weight.name)]

    return [(engine, "partial_over_tensor_ranks", some)]


def norm_gradients_not_summed() -> list[Patch]:
    return _summed_only(lambda name: "norm" not in name)


def row_bias_gradients_not_summed() -> list[Patch]:
    return _summed_only(lambda name: not name.endswith(("proj.bias", "down.bias")))


def position_gradients_not_summed() -> list[Patch]:
    return _summed_only(lambda name: "positions" not in name)


def split_gradients_summed_too() -> list[Patch]:
    partial = engine.partial_over_tensor_ranks

    def and_more(model: TrainableModel) -> list[Tensor]:
        return partial(model) + [weight.leaf for weight in model.trained if weight.name.endswith("up.bias")]

    return [(engine, "partial_over_tensor_ranks", and_more)]


def row_bias_added_by_every_rank() -> list[Patch]:
    def forward(self: tensor.RowParallelLinear, x: Tensor) -> Tensor:
        return tensor._leave(linear(x, local(self.weight), self.bias), self.axis, self.sequence_dim)

    return [(tensor.RowParallelLinear, "forward", forward)]


def dropout_mask_by_local_position() -> list[Patch]:
    make = SHARDINGS[OverSequence].make

    def local_place(rule: OverSequence, module: nn.Module, context: ShardingContext) -> nn.Module:
        return module.of_part({1: Slice()}) if isinstance(module, Dropout) else make(rule, module, context)

    return [sharded_by(OverSequence, local_place)]


def positions_start_anew_on_every_rank() -> list[Patch]:
    make = SHARDINGS[OverSequence].make

    def anew(rule: OverSequence, module: nn.Module, context: ShardingContext) -> nn.Module:
        return module if isinstance(module, PositionEmbedding) else make(rule, module, context)

    return [sharded_by(OverSequence, anew)]


def input_gradient_not_summed() -> list[Patch]:
    def own_part(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        axis, dim = ctx.where
        return grad.chunk(axis.size, dim)[axis.index].contiguous(), None, None

    return [(collectives._GatherShares, "backward", staticmethod(own_part))]


def shares_joined_in_another_order() -> list[Patch]:
    gather = Axis.all_gather_equal

    def rolled(self: Axis, x: Tensor, dim: int) -> Tensor:
        return gather(self, x, dim).roll(x.shape[dim], dim)

    return [(Axis, "all_gather_equal", rolled)]


def pipeline_expects_whole_activations() -> list[Patch]:
    return [(engine, "PipelineRunner", _whole_activation)]


def _whole_activation(stages, parallelism, schedule, micro_batches, activation, *others):
    size, positions, hidden = activation
    whole = (size, positions * parallelism.mesh.tp.size, hidden)
    return _RUNNER(stages, parallelism, schedule, micro_batches, whole, *others)


_RUNNER = engine.PipelineRunner

TP, TP_PP = {"tp": 2}, {"tp": 2, "pp": 2}
MISTAKES = [
    (norm_gradients_not_summed, TP, "norm.weight"),
    (row_bias_gradients_not_summed, TP, "proj.bias"),
    (position_gradients_not_summed, TP, "grad embed.positions"),
    (split_gradients_summed_too, TP, "up.bias"),
    (row_bias_added_by_every_rank, TP, "loss"),
    (dropout_mask_by_local_position, TP, "grad"),
    (positions_start_anew_on_every_rank, TP, "loss"),
    (input_gradient_not_summed, TP, "norm.weight"),
    (shares_joined_in_another_order, TP, "loss"),
    (norm_gradients_not_summed, TP_PP, "norm.weight"),
]


@pytest.mark.parametrize(("mistake", "layout", "sign"), MISTAKES, ids=[f"{m.__name__}-{at}" for m, at, _ in MISTAKES])
def test_mistake_is_found(pool, expected, mistake: Callable[[], list[Patch]], layout: dict, sign: str) -> None:
    case = shared(dtype="fp64", dropout=0.1, **layout)
    found = departures(expected(case), pool.run(case.world_size, with_mistake, mistake, in_layout, case), case)
    assert any(sign in departure for departure in found), found[:5]


def test_wrong_activation_shapes_end_the_run(pool) -> None:
    case: Case = shared(dtype="fp64", **TP_PP)
    with pytest.raises(Exception, match="were declared"):
        pool.run(case.world_size, with_mistake, pipeline_expects_whole_activations, in_layout, case)
