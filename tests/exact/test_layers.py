"""Arithmetic of exact runs: the same bits for any cut, offset, stride and number of threads, and right to rounding."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from math import gcd, isnan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exact.support import tree
from tests.support.bits import THREADS, close, cuts, drawn, equal, same_in_threads, with_gradients
from tests.support.sweep import sweep
from threefold.errors import UserError
from threefold.exact import functions as exact_functions
from threefold.exact import layers, totals
from threefold.exact import products as exact_products
from threefold.exact.attention import exact_attention
from threefold.exact.functions import ExactFunctions
from threefold.exact.layers import RowSum
from threefold.exact.modules import ExactAttention, ExactPositions
from threefold.exact.products import equal_parts
from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import PositionEmbedding, SampleInfo
from threefold.models.layers.rope_scaling import RopeScaling
from threefold.ops.attention import attention
from threefold.ops.kernels import AttentionMask
from threefold.ops.kernels import linear as plain_linear
from threefold.random.dropout import sample_keys
from threefold.random.rng import Slice

WIDTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 257, 513, 1000)
SIZES = (1, 2, 3, 5, 8, 24, 33, 88, 130, 513)
PIECES = 8


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def moved(x: Tensor) -> Tensor:
    """Return a copy that begins in the middle of a processor's vector."""
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def strided(x: Tensor) -> Tensor:
    """Return a copy with other numbers between the rows."""
    return drawn(*x.shape[:-1], x.shape[-1] + 3)[..., 1:-2].copy_(x)


def of_ranks(ranks: int, x: Tensor, dim: int = 0) -> list[Tensor]:
    return list(x.chunk(ranks, dim))


def test_tree_sum_is_the_tree_that_its_docstring_draws() -> None:
    a, b, c, d, e = parts = [drawn(5, seed=each) for each in range(5)]
    assert equal(tree(parts[:4]), (a + b) + (c + d))
    assert equal(tree(parts), ((a + b) + (c + d)) + e)
    assert not equal(tree(parts[:4]), ((a + b) + c) + d), "the numbers show no order"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [1, 3, 16, 33, 1000])
def test_sum_of_rows_is_the_tree_over_ranks(ranks: int, columns: int) -> None:
    x = drawn(PIECES * 5, columns)
    whole = same_in_threads(lambda: RowSum(PIECES)(x)[0])
    parts = [RowSum(PIECES // ranks)(each)[0] for each in of_ranks(ranks, x)]
    assert equal(tree(parts), whole)
    assert close(whole, x.double().sum(0))
    assert all(equal(RowSum(PIECES)(x[:, cut])[0], whole[cut]) for cut in cuts(columns) if x[:, cut].numel())


@sweep("inner", SIZES, quick=(5,), slow=(1, 7, 8))
def test_products(inner: int) -> None:
    """An element depends on its parts of both operands alone, whatever is beside them in memory."""
    for rows in SIZES:
        for columns in SIZES:
            if rows * columns * inner > 1 << 21:
                continue
            a, b = drawn(rows, inner), drawn(columns, inner, seed=1)
            of_rows, of_columns = equal_parts(gcd(rows, PIECES)), gcd(columns, PIECES)
            whole = same_in_threads(partial(exact_products.product, a, b, 1, of_rows, of_columns))
            where = f"[{rows}, {inner}] x [{columns}, {inner}]"
            assert close(whole, a.double() @ b.double().t(), 1e-5), where
            for change in (moved, strided, lambda x: x.t().contiguous().t()):
                assert equal(exact_products.product(change(a), change(b), 1, of_rows, of_columns), whole), where
            for part, expected in zip(a.chunk(len(of_rows)), whole.chunk(len(of_rows)), strict=True):
                assert equal(exact_products.product(part, b, columns=of_columns), expected), where
            for part, expected in zip(b.chunk(of_columns), whole.chunk(of_columns, 1), strict=True):
                assert equal(exact_products.product(a, part, 1, of_rows), expected), where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_turned_operands_has_the_same_bits(dtype: torch.dtype) -> None:
    """Such as a weight's gradient, which is turned if that copies less."""
    halves = equal_parts(2)
    for rows, columns, inner in ((512, 64, 256), (64, 512, 256), (100, 7, 33), (1024, 24, 1000), (2, 2, 40)):
        a, b = drawn(inner, rows).to(dtype).t(), drawn(inner, columns, seed=1).to(dtype).t()
        whole = same_in_threads(partial(exact_products.product, a, b, 1, halves))
        assert whole.is_contiguous()
        assert equal(exact_products.product(a.contiguous(), b.contiguous(), 1, halves), whole), (rows, columns, inner)
        assert equal(exact_products.product(a[rows // 2 :], b), whole[rows // 2 :]), (rows, columns, inner)


def test_operands_that_repeat_memory_have_the_same_bits() -> None:
    """Such as a gradient that a sum hands to all its terms; torch computes batches of them with another kernel."""
    a, b = drawn(1, 48, 64), drawn(4, 32, 64, seed=1)
    for repeated in (a.expand(4, 48, 64), a[:, :1].expand(4, 48, 64), a[..., :1].expand(4, 48, 64)):
        expected = same_in_threads(lambda x=repeated: exact_products.products(x.contiguous(), b))
        assert equal(exact_products.products(repeated, b), expected)
        assert exact_products._batch_form(repeated)[1] is None


@pytest.mark.parametrize("sizes", [(5, 3, 7), (33, 70, 16), (8, 16, 3), (0, 3, 4), (4, 0, 3)])
def test_products_of_tiles(sizes: tuple[int, int, int]) -> None:
    """As on a GPU: every product is of two tiles of one shape, contiguous, whatever the operands are cut from."""
    rows, columns, inner = sizes
    a, b = strided(drawn(rows, inner)).double(), drawn(inner, columns).t().double()
    found = exact_products.tiled_product(a, b, tile=8)
    torch.testing.assert_close(found, a @ b.t())
    assert all(equal(found[:, first:], exact_products.tiled_product(a, b[first:], tile=8)) for first in (1, 3, 9))


def test_products_with_long_sums() -> None:
    for rows, columns in ((1, 1), (3, 17), (16, 64)):
        a, b = drawn(rows, 8191), drawn(columns, 8191, seed=1)
        whole = same_in_threads(partial(exact_products.product, a, b, 1, equal_parts(rows)))
        assert equal(exact_products.product(a[:1], b), whole[:1])


@pytest.mark.parametrize("inner", [16, 20, 96, 128, 160, 256, 300])
def test_batch_of_products_has_the_bits_of_each(inner: int) -> None:
    """Whichever kernel computes a batch, any part of it has the bits of products of runs of 128."""
    for rows, columns in ((16, 16), (48, 160), (33, 64), (64, 24), (256, 32)):
        a, b = drawn(6, rows, inner), drawn(6, columns, inner, seed=1)
        whole = same_in_threads(partial(exact_products.products, a, b))
        for one, other, found in zip(a, b, whole, strict=True):
            runs = zip(one.split(128, 1), other.split(128, 1), strict=True)
            assert equal(tree([exact_products.product(*run) for run in runs]), found)
        for change in (lambda x: x, moved, strided, lambda x: x.mT.contiguous().mT):
            for part in (slice(0, 1), slice(2, 5)):
                assert equal(exact_products.products(change(a)[part], change(b)[part]), whole[part])


@pytest.mark.parametrize("inner", [64, 128, 160, 1024, 8192])
def test_pieces_computed_together_have_the_bits_of_each(inner: int) -> None:
    for rows, columns in ((16, 16), (64, 256), (20, 33), (256, 1024)):
        a, b = drawn(rows, inner), drawn(columns, inner, seed=1)
        for change in (lambda x: x, lambda x: x.t().contiguous().t()):
            whole = same_in_threads(partial(exact_products.product, a, change(b), PIECES))
            parts = zip(a.chunk(PIECES, 1), b.chunk(PIECES, 1), strict=True)
            assert equal(tree([exact_products.product(*each) for each in parts]), whole), (rows, columns)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [5, 16, 64])
def test_rows_of_several_samples_are_summed_as_the_tree_over_ranks(ranks: int, columns: int) -> None:
    """A rank of sequence parallelism holds some positions of every sample."""
    x = drawn(4, PIECES * 6, columns)
    whole = same_in_threads(lambda: RowSum(PIECES)(x)[0])
    assert close(whole, x.double().sum((0, 1)))
    assert equal(tree([RowSum(PIECES // ranks)(part)[0] for part in x.chunk(ranks, 1)]), whole)


def test_no_rows() -> None:
    """Of an expert of a user's own model that has no tokens."""
    weight = drawn(6, 5).requires_grad_()
    x = drawn(0, 5).requires_grad_()
    out = layers.linear(x, weight, None, rows=RowSum(PIECES))
    out.sum().backward()
    assert out.shape == (0, 6)
    assert x.grad is not None
    assert x.grad.shape == (0, 5)
    assert equal(weight.grad, torch.zeros(6, 5))
    for shape in ((0, 8, 5), (2, 0, 5)):
        assert equal(RowSum(PIECES)(torch.zeros(shape))[0], torch.zeros(5))


@pytest.mark.parametrize(("samples", "rows"), [(1, 1), (1, 2), (1, 257), (1, 300), (2, 1), (2, 130), (3, 129), (5, 3)])
def test_rows_of_any_number_are_summed(samples: int, rows: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = drawn(samples, PIECES * rows, 70).to(dtype)
        whole = same_in_threads(lambda x=x: RowSum(PIECES)(x, dtype=torch.float32)[0])
        assert close(whole, x.double().sum((0, 1)))
        for columns in (slice(3, 40), slice(64, 70)):
            assert equal(RowSum(PIECES)(x[..., columns], dtype=torch.float32)[0], whole[columns])


def test_rows_of_other_shapes_are_summed_in_runs() -> None:
    """Of a user's own model, whose first dims may be anything."""
    x = drawn(4, 6, 5)
    assert equal(RowSum(PIECES)(x)[0], RowSum(PIECES)(x.flatten(0, 1))[0])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_linear_is_the_tree_over_ranks(ranks: int) -> None:
    """The output over cut input features, the input's gradient over cut output features, bias over cut rows."""
    x, weight, bias = drawn(1, 24, 40), drawn(72, 40, seed=1), drawn(72, seed=2)
    rows = RowSum(PIECES)
    kinds = (partial(layers.linear, inner=PIECES, rows=rows), partial(layers.linear, outer=PIECES, rows=rows))
    row, column = (same_in_threads(partial(with_gradients, kind, x, weight, bias)) for kind in kinds)
    reference = with_gradients(plain_linear, x.double(), weight.double(), bias.double())
    for found in (row, column):
        assert all(close(*each, 1e-5) for each in zip(found, reference, strict=True))
    mine = PIECES // ranks
    parts = [
        with_gradients(lambda x, w: layers.linear(x, w, None, inner=mine), *each, upper=drawn(*row[0].shape, seed=7))
        for each in zip(of_ranks(ranks, x, -1), of_ranks(ranks, weight, 1), strict=True)
    ]
    assert equal(tree([part[0] for part in parts]) + bias, row[0])
    assert equal(torch.cat([part[1] for part in parts], -1), row[1])
    assert equal(torch.cat([part[2] for part in parts], 1), row[2])
    uppers = of_ranks(ranks, drawn(*column[0].shape, seed=7), -1)
    parts = [
        with_gradients(lambda x, w, b: layers.linear(x, w, b, outer=mine, rows=rows), x, w, b, upper=upper)
        for w, b, upper in zip(of_ranks(ranks, weight), of_ranks(ranks, bias), uppers, strict=True)
    ]
    assert equal(torch.cat([part[0] for part in parts], -1), column[0])
    assert equal(tree([part[1] for part in parts]), column[1])
    assert equal(torch.cat([part[2] for part in parts]), column[2])
    assert equal(torch.cat([part[3] for part in parts]), column[3])


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (exact_functions.gelu, F.gelu),
    "gelu_tanh": (lambda x: exact_functions.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "silu": (exact_functions.silu, F.silu),
    "sigmoid": (exact_functions.sigmoid, torch.sigmoid),
}
TRUSTED: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "tanh": torch.tanh,
    "erf": torch.erf,
    "square root": lambda x: x.abs().sqrt(),
    "reciprocal": torch.reciprocal,
    "quotient": lambda x: x / (x + 3),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *TRUSTED])
def test_elementwise(name: str) -> None:
    compute = FUNCTIONS[name][0] if name in FUNCTIONS else TRUSTED[name]

    def both(x: Tensor) -> tuple[Tensor, ...]:
        if name in TRUSTED:
            return (compute(x),)
        return with_gradients(compute, x, upper=torch.ones_like(x))

    for width in (*WIDTHS, 70_001):
        x = drawn(width) * 3
        whole = same_in_threads(partial(both, x))
        for change in (moved, strided):
            assert all(map(equal, both(change(x)), whole)), width
        for cut in cuts(width):
            if len(x[cut]):
                assert all(equal(part, each[cut]) for part, each in zip(both(x[cut].clone()), whole, strict=True))
        if name in FUNCTIONS:
            reference = with_gradients(FUNCTIONS[name][1], x.double(), upper=torch.ones_like(x))
            assert all(map(close, whole, reference)), width


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, pieces: int = PIECES) -> Tensor:
    return layers.layer_norm(x, weight, bias, 1e-5, RowSum(pieces))


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor, pieces: int = PIECES) -> Tensor:
    return layers.add_bias(layers.rms_norm(x, weight, 1e-5, RowSum(pieces)), bias, RowSum(pieces))


NORMS = {
    layer_norm: lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, 1e-5),
    rms_norm: lambda x, weight, bias: F.rms_norm(x, weight.shape, weight, 1e-5) + bias,
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_the_tree_over_ranks(norm: Callable[..., Tensor], width: int) -> None:
    x, weight, bias = drawn(1, PIECES * 3, width), drawn(width, seed=1), drawn(width, seed=2)
    whole = same_in_threads(lambda: with_gradients(norm, x, weight, bias))
    assert all(map(equal, with_gradients(norm, strided(x), moved(weight), bias), whole))
    reference = with_gradients(NORMS[norm], x.double(), weight.double(), bias.double())
    if width > 2:  # of two elements alike, a layer norm has the difference of equal numbers
        assert all(close(*each, 1e-4) for each in zip(whole, reference, strict=True))
    for ranks in (2, 4, 8):
        parts = [
            with_gradients(lambda *a, ranks=ranks: norm(*a, PIECES // ranks), part, weight, bias, upper=upper)
            for part, upper in zip(of_ranks(ranks, x, 1), of_ranks(ranks, drawn(*x.shape, seed=7), 1), strict=True)
        ]
        found = list(zip(*parts, strict=True))
        assert equal(torch.cat(found[0], 1), whole[0])
        assert equal(torch.cat(found[1], 1), whole[1])
        assert equal(tree(list(found[2])), whole[2])
        assert equal(tree(list(found[3])), whole[3])


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": exact_functions.softmax,
    "log-sum-exp": lambda x: exact_functions.logsumexp(x).unsqueeze(-1),
    "largest": lambda x: x.amax(-1, keepdim=True),
    "sum": layers.last_dim_summed,
}


@pytest.mark.parametrize("name", [*ROWS, "torch's softmax"])
def test_rows(name: str) -> None:
    """A row's bits depend neither on the other rows nor on threads."""

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        return with_gradients(ROWS[name], x, upper=upper[: len(x)]) if name in ROWS else (x.softmax(-1),)

    for width in (*WIDTHS, 2048, 70_001):
        for rows in (1, 2, 3, 7, 33, 257) if width < 1 << 16 else (1, 2):
            x = drawn(rows, width)
            upper = drawn(1, width if "softmax" in name else 1, seed=7).expand(rows, -1)
            whole = same_in_threads(partial(compute, x))
            for cut in cuts(rows):
                part = x[cut]
                if not len(part):
                    continue
                torch.set_num_threads(4)
                for change in (Tensor.clone, moved):
                    found = compute(change(part))
                    assert all(equal(each, of[cut]) for each, of in zip(found, whole, strict=True)), (rows, width)


def masked(rows: int, length: int, window: int, documents: bool) -> AttentionMask:
    ids = torch.arange(length) * 3 // length if documents else None
    return AttentionMask(window, None if ids is None else ids.expand(rows, -1))


CASES = {
    "one position": (1, 8, 8, 4, 0, False),
    "odd": (7, 8, 8, 5, 0, False),
    "24 x 5": (24, 8, 8, 5, 0, False),
    "33 x 6, grouped": (33, 16, 8, 6, 0, False),
    "window": (80, 8, 8, 4, 9, False),
    "documents": (70, 16, 8, 8, 0, True),
    "both": (300, 8, 8, 2, 100, True),
    "513 x 20": (513, 8, 8, 20, 0, False),
}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", CASES)
def test_attention_depends_on_neither_heads_nor_threads(name: str, dropout: float) -> None:
    length, heads, groups, width, window, documents = CASES[name]
    samples = SampleInfo(sample_keys(3, 4, torch.arange(1)) if dropout else None, masked(1, length, 0, documents)[1])

    def core(index: int, ranks: int) -> Callable[..., Tensor]:
        layer = ExactAttention(dropout, window, "core")
        layer.dropout = layer.dropout.of_part({1: Slice(index * heads // ranks, heads)})
        return lambda q, k, v: layer(q, k, v, samples)

    q, k, v = (drawn(1, length, count, width, seed=each) for each, count in enumerate((heads, groups, groups)))
    upper = drawn(1, length, heads * width, seed=9)
    whole = same_in_threads(lambda: with_gradients(core(0, 1), q, k, v, upper=upper))
    assert all(map(equal, with_gradients(core(0, 1), strided(q), strided(k), moved(v), upper=upper), whole))
    plain = CausalAttention(dropout, window, "core").double()
    reference = with_gradients(lambda *a: plain(*a, samples), q.double(), k.double(), v.double(), upper=upper)
    assert all(close(*each, 1e-5) for each in zip(whole, reference, strict=True))
    for ranks in (2, 4, 8):
        for index, inputs in enumerate(zip(*(of_ranks(ranks, each, 2) for each in (q, k, v)), strict=True)):
            part = of_ranks(ranks, upper, 2)[index]
            torch.set_num_threads(4 if index == 1 else 1)
            found = with_gradients(core(index, ranks), *inputs, upper=part)
            assert all(
                equal(each, of_ranks(ranks, all_of, 2)[index]) for each, all_of in zip(found, whole, strict=True)
            )


def test_attention_of_a_sample_does_not_depend_on_others() -> None:
    q, k, v = (drawn(3, 40, 4, 6, seed=each) for each in range(3))
    ids = torch.stack([torch.arange(40) // 9, torch.zeros(40, dtype=torch.int64), torch.arange(40) // 9])
    whole = exact_attention(q, k, v, AttentionMask(12, ids))
    for row in range(3):
        of_row = slice(row, row + 1)
        found = exact_attention(q[of_row], k[of_row], v[of_row], AttentionMask(12, ids[of_row]))
        assert equal(found, whole[of_row])
    assert close(whole, attention(q.double(), k.double(), v.double(), AttentionMask(12, ids)))


class RenamedAttention(CausalAttention):
    """A subclass with the forward of its base."""


class OtherAttention(CausalAttention):
    def forward(self, *inputs: Any) -> Tensor:
        return super().forward(*inputs)


def test_an_attention_with_another_forward_is_refused() -> None:
    assert ExactAttention.of(RenamedAttention(window=3)).window == 3
    with pytest.raises(UserError) as told:
        ExactAttention.of(OtherAttention())
    assert str(told.value) == (
        "train.exact is true, which computes attention itself, without the forward of OtherAttention; use false."
    )
    with pytest.raises(UserError) as told:
        ExactAttention.of(CausalAttention(softcap=2.0))
    assert str(told.value) == ("train.exact is true, which computes attention without soft caps and sinks; use false.")


def test_attention_with_a_factor_of_its_own() -> None:
    core, given = CausalAttention(scale=0.3), [drawn(2, 9, 3, 4, seed=each).double() for each in range(3)]
    torch.testing.assert_close(ExactAttention.of(core)(*given), core(*given))


def test_torchs_attention_depends_on_heads_or_threads() -> None:
    """Why there is another one; if no length shows it any more, torch's may be trusted again."""

    def compute(*inputs: Tensor) -> tuple[Tensor, ...]:
        upper = drawn(1, inputs[0].shape[1], inputs[0].shape[2] * inputs[0].shape[3], seed=7)
        return with_gradients(lambda *a: attention(*a), *inputs, upper=upper)

    different = 0
    for length, width in ((24, 5), (33, 6), (130, 20), (513, 20)):
        q, k, v = (drawn(1, length, 8, width, seed=each) for each in range(3))
        one = drawn(1, length, 8 * width, seed=7)[..., :width]
        whole = with_gradients(attention, q, k, v, upper=drawn(1, length, 8 * width, seed=7))
        for count in THREADS:
            torch.set_num_threads(count)
            again = compute(q, k, v)
            alone = with_gradients(attention, *(each[:, :, :1] for each in (q, k, v)), upper=one)
            different += not all(map(equal, again, whole))
            different += not equal(alone[0], whole[0][..., :width])
    if torch.backends.mkl.is_available():
        assert different


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_positions_by_document_are_the_tree_over_ranks(ranks: int) -> None:
    """A position that occurs on several ranks: each keeps some rows of the sum, and the sum of all has its bits."""
    x, table = drawn(1, 48, 5), drawn(20, 5, seed=1)
    ids = torch.arange(48).remainder(13).unsqueeze(0)
    upper = drawn(1, 48, 5, seed=7)

    def gradient(part: slice, pieces: int, own: range, over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
        plain = PositionEmbedding(20, 5, Slice(part.start, 48))
        plain.weight = nn.Parameter(table)
        layer = ExactPositions.of(plain, RowSum(pieces, over_ranks), own)
        out = layer(x[:, part], SampleInfo(positions=ids))
        assert equal(out, table[ids[:, part]])
        (found,) = torch.autograd.grad(out, layer.weight, upper[:, part])
        return found

    whole = same_in_threads(lambda: gradient(slice(0, 48), PIECES, range(20), None))
    expected = torch.zeros(20, 5, dtype=torch.float64).index_add(0, ids[0], upper[0].double())
    assert close(whole, expected)
    size, found, own_sums = 48 // ranks, torch.zeros(20, 5), list[Tensor]()
    parts = [slice(start, start + size) for start in range(0, 48, size)]
    for part in parts:
        own_sums.append(gradient(part, PIECES // ranks, range(20), None))
    for index, part in enumerate(parts):
        own = range(20 * index // ranks, 20 * (index + 1) // ranks)
        found += gradient(part, PIECES // ranks, own, lambda _: tree(own_sums))
    assert equal(found, whole)


@pytest.mark.parametrize("method", ["none", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_rotation_depends_on_neither_heads_nor_threads(method: Any) -> None:
    scaling = RopeScaling(method, factor=3.0, original_positions=1000, attention_factor=1.1, long_factors=(1, 2, 3))
    rotary = Rotary(6, 100.0, scaling)
    q, k = drawn(1, 6000, 8, 6), drawn(1, 6000, 4, 6, seed=1)
    upper = torch.cat([drawn(1, 6000, 8, 6, seed=7), drawn(1, 6000, 4, 6, seed=8)], 2)

    def turned(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat(rotary(q, k), 2)

    whole = same_in_threads(partial(with_gradients, turned, q, k, upper=upper))
    of_last = with_gradients(turned, strided(q[:, :, 6:]), k[:, :, 3:], upper=upper[:, :, [6, 7, 11]])
    assert equal(of_last[0], whole[0][:, :, [6, 7, 11]])
    assert equal(of_last[1], whole[1][:, :, 6:])
    assert equal(of_last[2], whole[2][:, :, 3:])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_repeated_heads_are_the_tree_over_ranks(ranks: int) -> None:
    x, upper = drawn(3, 2, 1, 5), drawn(3, 2, 4, 5, seed=7)
    out, whole = with_gradients(partial(layers.repeat, times=4), x, upper=upper)
    assert equal(out, x.expand(-1, -1, 4, -1))
    parts = [
        with_gradients(partial(layers.repeat, times=4 // ranks), x, upper=each)[1] for each in of_ranks(ranks, upper, 2)
    ]
    assert equal(tree(parts), whole)


def test_arithmetic_replaces_what_torch_computes_otherwise() -> None:
    """Each replacement is found by the name that models call it by, and no other function is."""
    x = drawn(4, 33)
    calls: dict[Callable[[], Tensor], Callable[[], Tensor]] = {
        lambda: nn.GELU()(x): lambda: exact_functions.gelu(x),
        lambda: F.silu(x): lambda: exact_functions.silu(x),
        lambda: x.sigmoid(): lambda: exact_functions.sigmoid(x),
        lambda: torch.sigmoid(x): lambda: exact_functions.sigmoid(x),
        lambda: nn.LayerNorm(33)(x): lambda: layers.layer_norm(x, torch.ones(33), torch.zeros(33), 1e-5, RowSum()),
        lambda: nn.RMSNorm(33, 1e-5)(x): lambda: layers.rms_norm(x, torch.ones(33), 1e-5, RowSum()),
        lambda: x.softmax(-1): lambda: exact_functions.softmax(x),
        lambda: x.sum(): lambda: exact_products.sum_dim(x.flatten(), 0),
        lambda: x.sum(1): lambda: x.sum(1),
    }
    for plain, expected in calls.items():
        with ExactFunctions(RowSum()):
            found = plain()
        assert equal(found, expected())
        assert close(found, plain(), 1e-5)


def test_sum_of_all_elements_is_no_view() -> None:
    """FSDP warns of a layer whose output, as the loss of the last one, is a view."""
    with ExactFunctions(RowSum()):
        total = torch.arange(7.0, requires_grad=True).sum()
    assert total._base is None
    assert total.item() == 21.0


def test_norms_of_rows_do_not_depend_on_threads_and_cuts() -> None:
    for rows, width in ((1, 1), (1, 33), (1, 40_000), (24, 9), (33, 1), (8, 513)):
        x = drawn(rows, width)
        whole = same_in_threads(partial(totals.row_norms, x, width))
        assert close(whole, x.double().norm(dim=1))
        for cut in cuts(rows):
            if len(x[cut]):
                assert equal(totals.row_norms(moved(x[cut]), width), whole[cut])


def test_digits_sum_to_the_same_number_in_any_order() -> None:
    values = drawn(1000).double() * 10.0 ** torch.arange(-6, 4).repeat(100)
    top = values.abs().max()

    def total(parts: list[Tensor]) -> float:
        digits = sum(totals.order_free_digits(part, top) for part in parts)
        assert isinstance(digits, Tensor)
        return totals.from_digits(digits.tolist(), float(top))

    whole = total([values])
    exactly = sum(map(Fraction, values.tolist()))
    assert abs(Fraction(whole) - exactly) <= Fraction(float(top)) * 1000 / 2**60
    shuffled = values[torch.randperm(1000, generator=torch.Generator().manual_seed(1))]
    assert total(list(shuffled.split(7))) == total(list(values.split(301))) == whole
    assert isnan(total([torch.full((4,), float("nan"), dtype=torch.float64)]))
