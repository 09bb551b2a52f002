"""Each parallel layer against its single-device namesake, forward and every gradient."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Event, Mesh
from threefold.constants import IGNORE_INDEX
from threefold.parallel.cross_entropy import ParallelCrossEntropy
from threefold.parallel.leaf import held
from threefold.parallel.parameter import whole
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

SIZES = (1, 2, 3, 4)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def assert_equal(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return whole(parameter.grad)


def reference_linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(seeded(outputs, inputs))
        if bias:
            linear.bias.copy_(seeded(outputs, seed=5))
    return linear


def against_linear(kind: str, bias: bool, whole_end: bool, pad_to: int) -> None:
    """Both layers on the same whole input and output gradient; 10 → 7 features divide by none of 2, 3, 4."""
    axis = Mesh(Layout(tp=torch.distributed.get_world_size())).tp
    linear = reference_linear(10, 7, bias)
    source = deepcopy(linear)  # a layer may take parameters over, whose gradients would then be those of both
    x, x_split = seeded(3, 5, 10).requires_grad_(), seeded(3, 5, 10).requires_grad_()
    grad = seeded(3, 5, 7, seed=9)
    expected = linear(x)
    expected.backward(grad)
    layer: ColumnParallelLinear | RowParallelLinear
    if kind == "column":
        layer = ColumnParallelLinear.from_linear(source, axis, gather_output=whole_end)
        layer.pad_to = pad_to
        cut = slice(*shard(7, axis.size, axis.index))
        got = layer(x_split)
        got.backward(grad if whole_end else grad[..., cut])
        assert_equal(got, expected if whole_end else expected[..., cut])
    else:
        layer = RowParallelLinear.from_linear(source, axis, input_is_parallel=not whole_end)
        cut = slice(*shard(10, axis.size, axis.index))
        got = layer(x_split if whole_end else x_split[..., cut])
        got.backward(grad)
        assert_equal(got, expected)
    assert x.grad is not None
    assert x_split.grad is not None
    if kind == "row" and not whole_end:
        assert_equal(x_split.grad[..., cut], x.grad[..., cut])
    else:
        assert_equal(x_split.grad, x.grad)
    assert linear.weight.grad is not None
    assert_equal(gradient_of(layer.weight), linear.weight.grad)
    if bias:
        assert layer.bias is not None
        assert linear.bias.grad is not None
        assert_equal(gradient_of(layer.bias), linear.bias.grad)


def shard(size: int, shards: int, index: int) -> tuple[int, int]:
    """As `torch.chunk` cuts, written without it."""
    pieces = torch.arange(size).chunk(shards)
    if index >= len(pieces):
        return size, size
    return int(pieces[index][0]), int(pieces[index][-1]) + 1


@sweep("size", SIZES, quick=(2,), slow=(3,))
@sweep("bias", [True, False], quick=(0,))
@pytest.mark.parametrize(("gather", "pad_to"), [(True, 1), (False, 1), (True, 8), (False, 3)])
def test_column_parallel_linear(pool, size: int, bias: bool, gather: bool, pad_to: int) -> None:
    pool.run(size, against_linear, "column", bias, gather, pad_to)


@sweep("size", SIZES, quick=(2,), slow=(3,))
@sweep("bias", [True, False], quick=(0,))
@pytest.mark.parametrize("scatter", [True, False])
def test_row_parallel_linear(pool, size: int, bias: bool, scatter: bool) -> None:
    pool.run(size, against_linear, "row", bias, scatter, 1)


def against_embedding(vocab: int, pad_to: int) -> int:
    axis = Mesh(Layout(tp=torch.distributed.get_world_size())).tp
    table = nn.Embedding(vocab, 6, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(seeded(vocab, 6))
    layer = VocabParallelEmbedding.from_embedding(deepcopy(table), axis)
    layer.pad_to = pad_to
    ids = torch.randint(0, vocab, (4, 9), generator=torch.Generator().manual_seed(3))
    grad = seeded(4, 9, 6)
    expected, got = table(ids), layer(ids)
    expected.backward(grad)
    got.backward(grad)
    assert_equal(got, expected)
    assert table.weight.grad is not None
    assert_equal(gradient_of(layer.weight), table.weight.grad)
    return held(layer.weight).shape[0]


@sweep("size", SIZES, quick=(3,), slow=(1,))
@sweep("pad_to", [1, 4], quick=(0,))
@pytest.mark.parametrize("vocab", [20, 10, 5])
def test_vocab_parallel_embedding(pool, size: int, vocab: int, pad_to: int) -> None:
    rows = pool.run(size, against_embedding, vocab, pad_to)
    assert sum(rows) == vocab
    assert rows == [end - start for start, end in (shard(vocab, size, index) for index in range(size))]


def own_rows() -> tuple[Tensor, tuple[int, int]]:
    layer = VocabParallelEmbedding(7, 3, Mesh(Layout(tp=torch.distributed.get_world_size())).tp, name="e")
    return layer.local_rows(torch.arange(7)).detach(), (layer.start, layer.end)


def test_foreign_ids_give_zero_rows(pool) -> None:
    for rows, (start, end) in pool.run(3, own_rows):
        owned = torch.arange(7).ge(start) & torch.arange(7).lt(end)
        assert (rows[owned] != 0).all()
        assert (rows[~owned] == 0).all()


def chain() -> tuple[list[Event], list[Event]]:
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    up = ColumnParallelLinear(6, 16, mesh.tp, name="up", gather_output=False)
    down = RowParallelLinear(16, 6, mesh.tp, name="down", input_is_parallel=True)
    x = torch.randn(2, 6, requires_grad=True)
    with mesh.recorder.recording() as forward:
        out = down(F.gelu(up(x)))
    with mesh.recorder.recording() as backward:
        out.sum().backward()
    return forward, backward


@pytest.mark.parametrize("size", [2, 4])
def test_column_then_row_is_one_all_reduce_each_way(pool, size: int) -> None:
    for forward, backward in pool.run(size, chain):
        assert forward == [Event("tp", "all_reduce", 2 * 6 * 4)]
        assert backward == [Event("tp", "all_reduce", 2 * 6 * 4)]


def against_cross_entropy(vocab: int, scale: float, dtype: torch.dtype, excluded: int = 0) -> dict[str, Any]:
    """Of logits that are −∞ for the first `excluded` entries of the vocabulary."""
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    whole_logits = (seeded(3, 8, vocab) * scale).to(dtype)
    whole_logits[..., :excluded] = -torch.inf
    labels = torch.randint(excluded, vocab, (3, 8), generator=torch.Generator().manual_seed(1))
    labels[0, 2:5] = IGNORE_INDEX
    grad = seeded(3, 8, seed=4).to(dtype)
    expected_logits = whole_logits.clone().requires_grad_()
    expected = F.cross_entropy(expected_logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
    expected.backward(grad)
    loss = ParallelCrossEntropy(vocab, mesh.tp)
    logits = whole_logits[..., loss.start : loss.end].clone().requires_grad_()
    with mesh.recorder.recording() as events:
        got = loss(logits, labels)
    got.backward(grad)
    assert expected_logits.grad is not None
    return {
        "loss": (got, expected.detach()),
        "grad": (logits.grad, expected_logits.grad[..., loss.start : loss.end]),
        "largest": max((event.nbytes for event in events), default=0),
    }


@sweep("size", SIZES, quick=(3,), slow=(1,))
@sweep("scale", [1.0, 1e4], quick=(1,))
@pytest.mark.parametrize("vocab", [12, 10, 5])
def test_parallel_cross_entropy(pool, size: int, vocab: int, scale: float) -> None:
    for found in pool.run(size, against_cross_entropy, vocab, scale, torch.float64):
        for got, expected in (found["loss"], found["grad"]):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12 * scale)
        # Two numbers per token travel at most: never a row of logits.
        assert found["largest"] <= 3 * 8 * 2 * 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_shard_without_a_finite_logit_adds_nothing(pool, dtype: torch.dtype) -> None:
    """As of a model that excludes entries of the vocabulary."""
    for found in pool.run(3, against_cross_entropy, 12, 1.0, dtype, 5):
        for got, expected in (found["loss"], found["grad"]):
            tolerance = 1e-12 if dtype == torch.float64 else 2**-6
            torch.testing.assert_close(got, expected.to(got.dtype), rtol=tolerance, atol=tolerance)


def test_parallel_cross_entropy_of_narrow_logits_is_wide(pool) -> None:
    for found in pool.run(2, against_cross_entropy, 12, 1.0, torch.bfloat16):
        assert found["loss"][0].dtype == torch.float32
        assert found["grad"][0].dtype == torch.bfloat16


def padded_chain(vocab: int, pad_to: int) -> int:
    """Embedding, head and loss, each with its padding, in a row. All logits are far below zero, which those of padded
    rows would be. Returns by how many rows the head of this rank is padded."""
    axis = Mesh(Layout(tp=torch.distributed.get_world_size())).tp
    table, linear = nn.Embedding(vocab, 6, dtype=torch.float64), reference_linear(6, vocab, bias=False)
    with torch.no_grad():
        table.weight.copy_(seeded(vocab, 6).abs() + 1)
        linear.weight.copy_(-seeded(vocab, 6, seed=2).abs() - 1)
    embedding = VocabParallelEmbedding.from_embedding(table, axis)
    head = ColumnParallelLinear.from_linear(linear, axis, gather_output=False)
    embedding.pad_to = head.pad_to = pad_to
    ids = torch.randint(0, vocab, (3, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(1, 1)
    labels[0, 2:5] = IGNORE_INDEX
    logits = linear(table(ids))
    assert logits.max() < -6
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    got = ParallelCrossEntropy(vocab, axis)(head(embedding(ids)), labels).sum()
    expected.backward()
    got.backward()
    assert_equal(got, expected)
    assert table.weight.grad is not None
    assert linear.weight.grad is not None
    assert_equal(gradient_of(embedding.weight), table.weight.grad)
    assert_equal(gradient_of(head.weight), linear.weight.grad)
    return -held(head.weight).shape[0] % pad_to


@sweep("size", (2, 3, 4), quick=(1,))
@pytest.mark.parametrize(("vocab", "pad_to"), [(10, 8), (5, 4)])
def test_padded_rows_never_enter_the_loss(pool, size: int, vocab: int, pad_to: int) -> None:
    assert sum(pool.run(size, padded_chain, vocab, pad_to)) > 0


def unknown_values(what: str) -> str:
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    try:
        if what == "label":
            ParallelCrossEntropy(10, mesh.tp)(torch.zeros(1, 5), torch.tensor([99]))
        else:
            VocabParallelEmbedding(10, 4, mesh.tp, name="e")(torch.tensor([99]))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("what", "message"), [("label", "in the vocabulary of 10"), ("id", "the table of 10 rows")])
def test_what_no_rank_holds_is_an_error(pool, what: str, message: str) -> None:
    assert all(message in found for found in pool.run(2, unknown_values, what))


def test_layers_of_a_mesh_of_one_process_without_a_group() -> None:
    axis = Mesh.alone().tp
    up, down = ColumnParallelLinear(4, 6, axis, name="a"), RowParallelLinear(6, 4, axis)
    table = VocabParallelEmbedding(7, 4, axis, name="c")
    y = down(up(table(torch.arange(7))))
    y.sum().backward()
    assert down.bias is not None
    assert up.bias is not None
    torch.testing.assert_close(y, (table.weight @ up.weight.T + up.bias) @ down.weight.T + down.bias)
    assert up.weight.grad is not None
    assert up.weight.grad.shape == (6, 4)
