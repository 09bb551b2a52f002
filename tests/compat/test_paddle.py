"""`split` in Paddle's form; its whole truth table against one process, forward and every gradient."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.sentences import sentence
from tests.support.sweep import sweep
from threefold.comm.axis import local_part
from threefold.comm.differentiable import gather_from, reduce_from
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.compat.paddle import Splitter, split
from threefold.errors import UserError
from threefold.parallel.parameter import whole


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@contextmanager
def in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def splitter() -> Splitter:
    return Splitter(Mesh(Layout(tp=torch.distributed.get_world_size())).tp)


def assert_equal(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def check_gradients(split: Splitter, name: str, expected: dict[str, Tensor]) -> None:
    parameters = dict(split.layers[name].named_parameters())
    assert set(parameters) == set(expected)
    for key, value in expected.items():
        found = parameters[key].grad
        assert found is not None
        assert_equal(whole(found), value)


def linear(axis: int, gather_out: bool, bias: bool, input_whole: bool) -> None:
    """6 → 7 features on 2 or 3 ranks: one divides, the other does not."""
    split = splitter()
    size, over = (6, 7), split.over
    weight, offset = seeded(*size).requires_grad_(), seeded(7).requires_grad_()
    x, upstream = seeded(4, 6).requires_grad_(), seeded(4, 7).mul(0.3)
    expected = x @ weight + (offset if bias and (axis == 1 or gather_out) else 0)
    expected.backward(upstream)

    own = x.detach().clone().requires_grad_()
    given = own if input_whole else local_part(own, over, 1)
    with in_double():
        got = split(
            given,
            size,
            operation="linear",
            axis=axis,
            num_partitions=over.size,
            gather_out=gather_out,
            weight_attr=weight.detach(),
            bias_attr=offset.detach() if bias else False,
            name="layer",
        )
    if not gather_out:  # what came out are features, or parts of a sum
        assert got.shape[-1] == (7 if axis == 0 else local_part(expected, over, 1).shape[-1])
        got = reduce_from(got, over) if axis == 0 else gather_from(got, over)
    assert_equal(got, expected)
    got.backward(upstream)
    grads = {"weight": weight.grad.T}
    if offset.grad is not None:
        grads["bias"] = offset.grad
    check_gradients(split, "layer", grads)
    if input_whole:
        assert_equal(own.grad, x.grad)
    else:
        assert_equal(local_part(own.grad, over, 1), local_part(x.grad, over, 1))


@sweep("bias", [True, False], quick=(0,))
@pytest.mark.parametrize("gather_out", [True, False])
@pytest.mark.parametrize(("axis", "input_whole"), [(0, True), (0, False), (1, True)])
@sweep("ranks", [2, 3], quick=(0,))
def test_linear(pool, ranks: int, axis: int, input_whole: bool, gather_out: bool, bias: bool) -> None:
    pool.run(ranks, linear, axis, gather_out, bias, input_whole)


def embedding(gather_out: bool) -> None:
    split = splitter()
    table, ids, upstream = seeded(7, 5).requires_grad_(), torch.tensor([[0, 6, 3], [3, 1, 5]]), seeded(2, 3, 5)
    expected = F.embedding(ids, table)
    expected.backward(upstream)
    with in_double():
        got = split(ids, (7, 5), "embedding", 0, split.over.size, gather_out, weight_attr=table.detach(), name="table")
    assert_equal(got, expected)
    got.backward(upstream)
    check_gradients(split, "table", {"weight": table.grad})


@pytest.mark.parametrize("gather_out", [True, False])
@sweep("ranks", [2, 3], quick=(1,))
def test_embedding_is_always_summed(pool, ranks: int, gather_out: bool) -> None:
    pool.run(ranks, embedding, gather_out)


def chain() -> tuple[list[float], list[tuple[str, tuple[int, ...]]]]:
    """A model of calls alone, trained: weights are found again by name, and start the same on any number of ranks."""
    split = splitter()
    n = split.over.size
    losses = []

    def model(ids: Tensor) -> Tensor:
        x = split(ids, (11, 6), operation="embedding", num_partitions=n, name="tokens")
        x = split(x, (6, 9), operation="linear", axis=1, num_partitions=n, gather_out=False, name="up")
        return split(F.gelu(x), (9, 4), operation="linear", axis=0, num_partitions=n, name="down")

    ids = torch.arange(10).view(2, 5)
    with in_double():
        model(ids)
    optimizer = torch.optim.SGD(split.parameters(), lr=1.0)
    for _ in range(3):
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [(name, tuple(parameter.shape)) for name, parameter in split.named_parameters()]


def test_weights_are_kept_by_name(pool) -> None:
    alone, names = pool.run(1, chain)[0]
    assert alone[2] < alone[1] < alone[0]
    assert names == [
        ("witness", (0,)),
        ("layers.tokens.weight", (11, 6)),
        ("layers.up.weight", (9, 6)),
        ("layers.up.bias", (9,)),
        ("layers.down.weight", (4, 9)),
        ("layers.down.bias", (4,)),
    ]
    for ranks in (2, 3):
        for losses, found in pool.run(ranks, chain):
            assert losses == pytest.approx(alone, rel=1e-12)
            assert found == names


REFUSED = [
    ({"operation": "conv"}, "operation is 'conv' but must be one of linear and embedding; use linear"),
    ({"operation": "embedding", "axis": 1}, "axis is 1 but an embedding is split by its rows; use 0"),
    ({"operation": "linear", "axis": 2}, "axis is 2 but a linear layer has dims 0 and 1; use 1"),
    ({"operation": "linear", "axis": -1}, "axis is -1 but a linear layer has dims 0 and 1; use 0"),
    ({"operation": "linear", "num_partitions": 3}, "num_partitions is 3 but tp has 1 ranks; use 1"),
    ({"operation": "linear", "size": (3,)}, "a weight has two dims"),
    ({"operation": "linear", "name": None}, "name is missing"),
    (
        {"operation": "linear", "size": (6, 3)},
        "x has 4 features but size is (6, 3), which takes 6, or this rank's 6 of ",
    ),
    ({"operation": "linear", "axis": 1, "size": (6, 3)}, "x has 4 features but size is (6, 3), which takes 6; give"),
    (
        {"operation": "linear", "weight_attr": torch.nn.init.ones_},
        "weight_attr is of the type function but must be a tensor of shape (4, 3), the values of all ranks; pass a fun",
    ),
    ({"operation": "linear", "weight_attr": torch.ones(3, 4)}, "weight_attr is of shape (3, 4) but must be a tensor"),
    ({"operation": "linear", "weight_attr": False}, "weight_attr is of the type bool but must be a tensor of shape"),
    (
        {"operation": "linear", "bias_attr": torch.ones(7)},
        "bias_attr is of shape (7,) but must be a tensor of shape",
    ),
    ({"operation": "linear", "bias_attr": torch.nn.init.ones_}, "bias_attr is of the type function but must be a ten"),
    (
        {"operation": "embedding"},
        "x is a tensor of torch.float32 but an embedding looks up whole numbers; use x.long().",
    ),
]


def refusal(options: dict) -> str:
    return sentence(splitter(), torch.ones(2, 4), **{"size": (4, 3), "name": "a", **options})


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_anything_else_is_an_error(pool, options: dict, sentence: str) -> None:
    found = pool.run(1, refusal, options)[0]
    assert sentence in found
    assert found.endswith(".")


def reuse() -> str:
    split = splitter()
    split(torch.ones(2, 4), (4, 3), "linear", name="a")
    with pytest.raises(UserError, match="'a' is the name of another operation") as caught:
        split(torch.ones(2, 4), (4, 3), "linear", 1, name="a")
    return str(caught.value)


def test_a_name_is_of_one_operation(pool) -> None:
    pool.run(1, reuse)


def in_two_steps() -> list[str]:
    """Names of the layers after two steps of a model of two calls without a name."""
    weights, x = splitter(), torch.ones(2, 6)
    for _ in range(2):
        with weights:
            hidden = split(x, (6, 4), "linear", axis=1, num_partitions=2, gather_out=False)
            split(hidden, (4, 6), "linear", axis=0, num_partitions=2)
    return list(weights.layers)


def test_calls_without_a_name_have_their_weights_again_in_each_step(pool) -> None:
    assert pool.run(2, in_two_steps) == [["split_0", "split_1"]] * 2


def too_late() -> list[str]:
    """An optimizer that is made before weights are would not train them."""
    said = []
    split = splitter()
    n = split.over.size
    calls = {
        "tokens": lambda: split(torch.arange(4), (11, 6), "embedding", num_partitions=n, name="tokens"),
        "up": lambda: split(torch.ones(2, 6), (6, 9), "linear", axis=1, num_partitions=n, name="up"),
    }
    for name, call in calls.items():
        optimizer = torch.optim.SGD(split.parameters(), lr=1.0)
        said.append(sentence(call))
        assert name not in split.layers
        del optimizer
        call()
    again = splitter()
    again.load_state_dict({}, strict=True)
    assert list(split.state_dict()) == ["layers.tokens.weight", "layers.up.weight", "layers.up.bias"]
    optimizer = torch.optim.SGD(split.parameters(), lr=1.0)
    before = whole(split.layers["up"].weight.detach()).clone()
    calls["up"]().square().sum().backward()
    optimizer.step()
    assert not torch.equal(whole(split.layers["up"].weight.detach()), before)
    return said


def test_weights_made_after_the_optimizer_are_an_error(pool) -> None:
    for said in pool.run(2, too_late):
        assert said == [
            f"The weights of {name!r} are made at the first call, now, but something has taken the splitter's "
            "parameters before, such as an optimizer, which would not train them; run the model once, and make the "
            "optimizer after that."
            for name in ("tokens", "up")
        ]
