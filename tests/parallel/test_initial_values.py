"""Initial values of parallel layers that a function of the user draws: the same whole weight on any number of ranks."""

import pytest
import torch
from torch import Tensor, nn

import threefold
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Axis, Mesh
from threefold.compat.paddle import Splitter, split
from threefold.errors import UserError
from threefold.parallel.parameter import whole
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def tensor_axis() -> Axis:
    return Mesh(Layout(tp=torch.distributed.get_world_size())).tp


def ramp(weight: Tensor) -> Tensor:
    """A value for each place, so that no shard can be another's; returned instead of set."""
    return torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape) + torch.rand(())


def skewed_(weight: Tensor) -> None:
    nn.init.xavier_normal_(weight)
    weight[0] += 3


def drawn(dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole parameters of layers of odd sizes, in the order in which they are made."""
    axis = tensor_axis()
    torch.manual_seed(3)
    torch.set_default_dtype(dtype)
    try:
        layers = {
            "column": ColumnParallelLinear(5, 7, axis, weight_init=nn.init.xavier_normal_, bias_init=ramp),
            "row": RowParallelLinear(7, 5, axis, weight_init=ramp, bias_init=nn.init.ones_),
            "named": RowParallelLinear(7, 5, axis, name="down", seed=2, weight_init=skewed_),
            "table": VocabParallelEmbedding(11, 3, axis, weight_init=skewed_),
            "as nn.Linear": ColumnParallelLinear(64, 50, axis),
            "as nn.Embedding": VocabParallelEmbedding(50, 64, axis),
        }
    finally:
        torch.set_default_dtype(torch.float32)
    return {f"{name}.{key}": whole(p).detach() for name, layer in layers.items() for key, p in layer.named_parameters()}


@sweep("dtype", [torch.float32, torch.float64], ids=str, quick=(0,))
@sweep("ranks", [2, 3], quick=(1,))
def test_whole_values_are_those_of_one_process(pool, ranks: int, dtype: torch.dtype) -> None:
    alone = pool.run(1, drawn, dtype)[0]
    assert len({tuple(value.flatten()[:3].tolist()) for value in alone.values()}) == len(alone)  # none is another's
    for found in pool.run(ranks, drawn, dtype):
        assert found.keys() == alone.keys()
        for name, value in found.items():
            assert torch.equal(value, alone[name]), name
            assert value.dtype == dtype


def test_values_are_those_of_the_functions(pool) -> None:
    found = pool.run(1, drawn, torch.float32)[0]
    assert torch.equal(found["row.bias"], torch.ones(5))
    assert found["named.bias"].abs().max() == 0
    steps = found["column.bias"].diff()
    torch.testing.assert_close(steps, torch.ones(6))
    assert found["table.weight"][0].mean() > 2 > found["table.weight"][1:].abs().max()
    bound = 1 / 64**0.5
    assert bound * 0.95 < found["as nn.Linear.weight"].abs().max() <= bound
    assert bound * 0.8 < found["as nn.Linear.bias"].abs().max() <= bound
    assert 0.95 < found["as nn.Embedding.weight"].std() < 1.05


def draws_outside() -> tuple[bool, bool]:
    """Whether a layer with a name, and one without, leave torch's default generator as it was."""
    axis = tensor_axis()
    before = torch.get_rng_state()
    ColumnParallelLinear(5, 7, axis, name="a", weight_init=nn.init.normal_)
    kept = torch.equal(torch.get_rng_state(), before)
    ColumnParallelLinear(5, 7, axis)
    return kept, torch.equal(torch.get_rng_state(), before)


def test_only_a_layer_without_a_name_draws_from_torchs_generator(pool) -> None:
    assert pool.run(1, draws_outside) == [(True, False)]


def named(places: list[tuple[str, int]]) -> list[Tensor]:
    axis = tensor_axis()
    made = [
        ColumnParallelLinear(5, 7, axis, name=name, seed=seed, weight_init=nn.init.normal_) for name, seed in places
    ]
    return [whole(layer.weight).detach() for layer in made]


def test_values_of_a_layer_with_a_name_follow_from_that_and_its_seed(pool) -> None:
    ((first, other_seed, other_name, again),) = pool.run(1, named, [("a", 2), ("a", 3), ("b", 2), ("a", 2)])
    assert again.equal(first)
    assert not torch.isclose(other_seed, first).any()
    assert not torch.isclose(other_name, first).any()


def refusals() -> list[str]:
    axis, found = tensor_axis(), []
    for options in ({"weight_init": "xavier"}, {"bias_init": lambda bias: torch.ones(3)}):
        try:
            threefold.ColumnParallelLinear(5, 7, axis, **options)  # type: ignore[arg-type]
        except UserError as error:
            found.append(str(error))
    return found


def test_wrong_initializers_are_one_sentence(pool) -> None:
    assert pool.run(1, refusals)[0] == [
        "weight_init is 'xavier' but must be a function of the whole weight; use one such as "
        "torch.nn.init.xavier_normal_.",
        "bias_init returns a tensor of shape [3] but the whole weight has [7]; return that, or change the weight in "
        "place.",
    ]


class Calls(nn.Module):
    """A model of `split` calls alone, without names."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.weights = Splitter(axis, seed=5)

    def forward(self, ids: Tensor) -> Tensor:
        n = self.weights.over.size
        with self.weights:
            x = split(ids, (11, 6), "embedding", num_partitions=n)
            x = split(x, (6, 9), "linear", axis=1, num_partitions=n, gather_out=False, weight_init=skewed_)
            return split(torch.tanh(x), (9, 4), "linear", num_partitions=n, bias_init=nn.init.ones_)


def trained() -> tuple[list[float], list[str]]:
    model, ids = Calls(tensor_axis()), torch.arange(10).view(2, 5)
    torch.set_default_dtype(torch.float64)
    try:
        model(ids)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = (model(ids) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [name for name, _ in model.named_parameters()]


def test_split_as_a_function_finds_its_weights_again(pool) -> None:
    alone, names = pool.run(1, trained)[0]
    assert alone[2] < alone[1] < alone[0]
    assert names[0] == "weights.witness"
    assert names[1:] == [f"weights.layers.split_{n}" for n in ("0.weight", "1.weight", "1.bias", "2.weight", "2.bias")]
    for losses, found in pool.run(3, trained):
        assert losses == pytest.approx(alone, rel=1e-12)
        assert found == names


def test_split_outside_of_a_block_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^split is called outside of a block that has its weights; make `weights = "):
        split(torch.ones(2, 4), (4, 3), "linear")
