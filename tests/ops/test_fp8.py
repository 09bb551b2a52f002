"""Products in float8: what rows are rounded to, wherever they are cut, and the gradients of a layer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.bits import drawn
from threefold.ops import fp8
from threefold.ops.kernels import DeferrableWeight

ROUNDING = 2.0**-4  # of 4 significant bits


def undone(x: Tensor) -> Tensor:
    values, undo = fp8.rounded(x)
    return values.double() * undo.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_a_row_is_rounded_to_four_bits(dtype: torch.dtype, size: float) -> None:
    x = (drawn(33, 70) * size).to(dtype)
    values, undo = fp8.rounded(x)
    assert values.dtype == torch.float8_e4m3fn
    assert undo.dtype == torch.float32
    mantissa, _ = undo.frexp()
    assert (mantissa == 0.5).all(), "a scale is not a power of two"
    largest = values.float().abs().amax(1)
    assert ((largest >= 128) & (largest <= 256)).all()
    error, far = (undone(x) - x.double()).abs(), x.double().abs() * ROUNDING
    assert (error <= far + x.double().abs().amax(1, keepdim=True) * 2.0**-17).all()
    assert error.max() > far.max() / 4, "nothing was rounded"


@pytest.mark.parametrize("ranks", [2, 5, 7])
def test_a_row_that_ranks_cut_is_rounded_as_a_whole_one(ranks: int) -> None:
    x = drawn(33, 70)
    x *= torch.logspace(-2, 2, 70)  # the ranks' parts have scales of their own
    parts = torch.cat([undone(part) for part in x.chunk(ranks, 1)], 1)
    whole = undone(x)
    small = x.abs() < x.abs().amax(1, keepdim=True) * 2.0**-13
    assert torch.equal(parts[~small], whole[~small])
    assert small.any()
    assert not small.all()


def test_rows_without_a_scale() -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-42, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [3e38, -3e38]])
    got = undone(rows)
    assert torch.equal(got[0], torch.zeros(2).double())
    assert got[1, 0].isfinite()
    assert got[2].isnan().all()
    assert got[3].isnan().all()
    assert got[4].isfinite().all()
    assert (got[4] - rows[4]).abs().max() <= 3e38 * ROUNDING


def of_rounded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(undone(x), undone(weight), None if bias is None else bias.double())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "compiled"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_a_layer_is_that_of_rounded_rows(compiled: bool, bias: bool, dtype: torch.dtype, limit: float) -> None:
    run = torch.compile(fp8.linear) if compiled else fp8.linear  # only here: it imports the compiler
    x, weight, grad = (drawn(*shape).to(dtype) for shape in ((3, 5, 24), (40, 24), (3, 5, 40)))
    shift = drawn(40).to(dtype) if bias else None
    leaves = [each.requires_grad_() for each in (x, weight, *([] if shift is None else [shift]))]
    out = run(x, weight, shift)
    got = torch.autograd.grad(out, leaves, grad)
    flat, upper = x.detach().flatten(0, 1), grad.flatten(0, 1)
    wanted = [
        of_rounded(flat, weight.detach(), None if shift is None else shift.detach()),
        of_rounded(upper, weight.detach().t(), None),
        upper.double().t() @ flat.double(),  # of unrounded rows
        upper.double().sum(0),
    ]
    for mine, right in zip((out.detach(), *got), wanted, strict=False):
        error = (mine.reshape(right.shape).double() - right).norm() / right.norm()
        assert error <= limit, error
    exact = F.linear(flat.double(), weight.detach().double(), None if shift is None else shift.detach().double())
    assert (out.detach().reshape(exact.shape).double() - exact).norm() / exact.norm() > 1e-2


class Deferred:
    is_open = True

    def __init__(self) -> None:
        self.later: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def defer(self, leaf: Tensor, gradient: Callable[[], Tensor]) -> None:
        self.later.append((leaf, gradient))


def test_gradients_of_weights_are_deferred() -> None:
    store = Deferred()
    weight, bias = (DeferrableWeight(drawn(*shape), store) for shape in ((40, 24), (40,)))
    x, grad = drawn(5, 24).requires_grad_(), drawn(5, 40)
    fp8.linear(x, weight, bias).backward(grad)
    assert weight.grad is None
    assert bias.grad is None
    assert x.grad is not None
    found = {id(leaf): gradient() for leaf, gradient in store.later}
    plain = nn.Linear(24, 40)
    plain(x.detach()).backward(grad)
    for leaf, right in ((weight, plain.weight), (bias, plain.bias)):
        assert right.grad is not None
        torch.testing.assert_close(found[id(leaf)], right.grad)
