"""Functions of torch that are known to be exact, and those that an exact run names."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.bits import close, cuts, drawn, equal, same_in_threads, with_gradients
from tests.support.exact import slow_but
from threefold.exact import custom_functions
from threefold.exact.custom import ELEMENTWISE, CustomFunctions, UnknownCalls
from threefold.exact.layers import RowSum


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


TWO: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + x.detach().flip(-1) * 0 + 1.5,
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.7),
    "addcmul": lambda x: torch.addcmul(x, x, x + 1, value=0.7),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_max": lambda x: x.clamp_max(1),
    "clamp_min": lambda x: x.clamp_min(1),
    "div": lambda x: x / (x + 9),
    "fmod": lambda x: torch.fmod(x, 0.7),
    "hardtanh": F.hardtanh,
    "lerp": lambda x: torch.lerp(x, x + 1, 0.3),
    "logaddexp": lambda x: torch.logaddexp(x, x + 1),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.5),
    "maximum": lambda x: torch.maximum(x, x * 0 + 0.2),
    "minimum": lambda x: torch.minimum(x, x * 0 + 0.2),
    "mul": lambda x: x * (x + 1),
    "remainder": lambda x: torch.remainder(x, 0.7),
    "sub": lambda x: x - 0.3 * x,
    "where": lambda x: torch.where(x > 0, x, 2 * x),
    "xlogy": lambda x: torch.xlogy(x.abs() + 0.1, x.abs() + 0.1),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
POSITIVE = ("log", "log10", "log1p", "log2", "sqrt")


def function(name: str) -> Callable[[Tensor], Tensor]:
    if name in TWO:
        return TWO[name]
    one: Callable[[Tensor], Tensor] = getattr(torch, name, None) or getattr(F, name)
    return (lambda x: one(x.abs() + 0.1)) if name in POSITIVE else one


@pytest.mark.parametrize("dtype", slow_but(DTYPES, torch.float32, sweep=DTYPES[2:]), ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE.split())
def test_bits_of_elements_depend_on_neither_place_nor_threads(name: str, dtype: torch.dtype) -> None:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        return with_gradients(function(name), x, upper=torch.ones_like(x))

    for width in (1, 7, 16, 33, 130, 513, 70_001):
        x = (drawn(width) * 3).to(dtype)
        whole = same_in_threads(partial(both, x)) if width > 1 << 15 else both(x)
        for change in (moved, strided):
            assert all(map(same, both(change(x)), whole)), width
        for cut in cuts(width):
            if len(x[cut]):
                assert all(same(part, each[cut]) for part, each in zip(both(x[cut].clone()), whole, strict=True)), width


def same(one: Tensor, other: Tensor) -> bool:
    return equal(one.nan_to_num(), other.nan_to_num())


def moved(x: Tensor) -> Tensor:
    """Return a copy that begins in the middle of a processor's vector."""
    return x.new_empty(x.numel() + 1)[1:].copy_(x)


def strided(x: Tensor) -> Tensor:
    return x.new_empty(x.numel(), 2)[:, 0].copy_(x)


@pytest.mark.parametrize("name", ["gather", "embedding", "linspace", "arange", "amax", "argsort"])
def test_bits_of_choices_depend_on_neither_place_nor_threads(name: str) -> None:
    ids = torch.randint(50, (3000, 1), generator=torch.Generator().manual_seed(1))
    computes: dict[str, Callable[[Tensor], Tensor]] = {
        "gather": lambda x: x.gather(0, ids.expand(-1, x.shape[1])),
        "embedding": lambda x: F.embedding(ids[:, 0], x),
        "linspace": lambda x: torch.linspace(0.1, 7.3, x.numel()) * x.flatten(),
        "arange": lambda x: torch.arange(x.numel()) * 0.1 * x.flatten(),
        "amax": lambda x: x.round().amax(0),
        "argsort": lambda x: x.round().argsort(0) * x,
    }
    x = drawn(3001, 40)
    upper = drawn(*computes[name](x).shape, seed=7)
    whole = same_in_threads(lambda: with_gradients(computes[name], x, upper=upper))
    if name in ("gather", "embedding", "amax", "argsort"):
        for cut in (slice(0, 1), slice(0, 20), slice(7, None)):
            found = with_gradients(computes[name], x[:, cut].clone(), upper=upper[..., cut])
            assert all(equal(each, of[..., cut]) for each, of in zip(found, whole, strict=True))


COMPOSED: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((3, 5, 8), (6, 8), (6,))),
    "vector": (lambda a, b: a @ b, ((7, 5), (5,))),
    "of a vector": (lambda a, b: a @ b, ((5,), (3, 5, 4))),
    "batches": (lambda a, b: torch.matmul(a, b), ((2, 1, 5, 4), (3, 4, 6))),
    "mm": (torch.mm, ((5, 4), (4, 6))),
    "norm of two dims": (lambda x, w, b: F.layer_norm(x, (4, 6), w, b), ((5, 4, 6), (4, 6), (4, 6))),
    "rms norm": (lambda x, w: F.rms_norm(x, (6,), w), ((5, 6), (6,))),
    "softmax": (lambda x: x.softmax(1), ((3, 7, 4),)),
    "log softmax": (lambda x: F.log_softmax(x, 1), ((3, 7, 4),)),
    "sums": (lambda x: x.sum((0, 2), keepdim=True) + x.sum() + x.sum(1).mean() + x.mean(-1, True), ((3, 7, 4),)),
    "cross entropy": (lambda x: F.cross_entropy(x.mT, torch.arange(15).view(3, 5) % 4), ((3, 5, 4),)),
    "ignored": (lambda x: F.cross_entropy(x, torch.tensor([1, -100, 3]), reduction="sum"), ((3, 4),)),
    "losses": (lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y, reduction="sum"), ((3, 4), (3, 4))),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), ((2, 3, 5, 4), (2, 3, 5, 4))),
    "grouped": (lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), ((2, 4, 5, 4), (2, 2, 5, 4))),
    "repeated": (lambda x, g, s: (1 - x * g) / (2 + s.exp()) + g.expand(3, 5, 4) + x**2, ((3, 5, 4), (4,), (1,))),
    "powers": (lambda x: (x.square() + 0.1) ** 0.5 + (x.square() + 0.1).rsqrt() + x.pow(3), ((3, 4),)),
    "activations": (lambda x: F.gelu(x) + F.silu(x) * torch.sigmoid(x) + F.relu(x) + x.tanh(), ((3, 4),)),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_is_replaced_is_torchs_up_to_rounding(name: str) -> None:
    compute, shapes = COMPOSED[name]
    inputs = [drawn(*shape, seed=seed).double() for seed, shape in enumerate(shapes)]
    calls = UnknownCalls()

    def exact(*inputs: Tensor) -> Tensor:
        with CustomFunctions(RowSum(), calls):
            out: Tensor = compute(*inputs)
        calls.walk(0, out)
        return out

    found, expected = with_gradients(exact, *inputs), with_gradients(compute, *inputs)
    assert all(close(*each, 1e-10) for each in zip(found, expected, strict=True))
    assert calls.take_new() == []


@pytest.mark.parametrize("rows", [40, 40_000])
def test_the_gradient_of_a_repeated_tensor_is_a_tree(rows: int) -> None:
    x, gate = drawn(rows, 33), drawn(33, seed=1)

    def gated(x: Tensor, gate: Tensor) -> Tensor:
        with CustomFunctions(RowSum(), UnknownCalls()):
            return x * gate

    whole = same_in_threads(partial(with_gradients, gated, x, gate))
    upper = drawn(rows, 33, seed=7)
    for cut in cuts(33):
        found = with_gradients(gated, x[:, cut].clone(), gate[cut].clone(), upper=upper[:, cut])
        assert equal(found[2], whole[2][cut])


class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


NAMED: dict[str, Callable[[Tensor], Any]] = {
    "torch.functional.einsum": lambda x: torch.einsum("ij,ij->i", x, x),
    "torch.nn.functional.dropout": lambda x: F.dropout(x, 0.5),
    "torch.Tensor.norm": lambda x: x.norm(),
    "torch.Tensor.cumsum": lambda x: x.cumsum(1),
    "torch.Tensor.__getitem__": lambda x: x[[0, 0]],
    "torch.Tensor.__pow__": lambda x: x**4,
    "torch.add": lambda x: torch.add(x, x, alpha=0.3),
    "torch.rand": lambda x: torch.rand(3),
    "torch.exp": lambda x: torch.exp(x.detach(), out=torch.empty(6, 4)),
    "aten.mul": lambda x: torch.ops.aten.mul(x, x),
    "torch.nn.functional.conv1d": lambda x: nn.Conv1d(6, 2, 1)(x),
    "torch.nn.functional.pad": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "torch.Tensor.var": lambda x: x.var(),
    "torch.nn.functional.softplus": lambda x: F.softplus(x),
    f"{__name__}.Mine": lambda x: Mine.apply(x),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_is_not_known_is_named(name: str) -> None:
    calls, x = UnknownCalls(), drawn(6, 4).requires_grad_()
    with CustomFunctions(RowSum(), calls):
        out = NAMED[name](x)
    calls.walk(0, {"out": [out]})
    found = calls.take_new()
    assert name in found, found
    assert calls.take_new() == []


class Marked(torch.Tensor):
    """Tensor of a user's own class."""


def test_tensors_of_a_subclass_stay_its() -> None:
    x, weight = drawn(3, 5).as_subclass(Marked), drawn(5, 5)
    with CustomFunctions(RowSum(), UnknownCalls()):
        for found in (F.linear(x, weight), F.gelu(x), F.layer_norm(x, [5]), x.softmax(-1), x @ weight):
            assert type(found) is Marked


def test_nothing_of_torchs_is_replaced_outside() -> None:
    x = drawn(3, 4).requires_grad_()
    assert custom_functions.expand(x, (3, 4)) is x
    assert "Products" not in type((x @ x.mT).grad_fn).__name__
