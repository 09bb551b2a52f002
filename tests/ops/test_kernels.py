"""The CPU's faster ways against torch's own: values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from threefold.cpu import kernels as cpu_kernels
from threefold.ops.kernels import causal_attention, embedding, later, linear


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).requires_grad_()


def close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (3, 7)], ids=str)
@pytest.mark.parametrize("mkl", [True, False], ids=["MKL", "oneDNN"])
def test_linear(
    monkeypatch: pytest.MonkeyPatch, mkl: bool, lead: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    """As on a processor on which either library is the faster."""
    monkeypatch.setattr(cpu_kernels, "_MKL_IS_FAST", mkl)

    def run(function) -> list[Tensor]:
        x, weight, shift = leaf(*lead, 13, dtype=dtype), leaf(9, 13, dtype=dtype), leaf(9, dtype=dtype, seed=1)
        inputs = [x, weight, shift] if bias else [x, weight]
        out = function(*inputs)
        out.backward(leaf(*lead, 9, dtype=dtype, seed=2).detach())
        return [out, *(each.grad for each in inputs)]

    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    for got, expected in zip(run(linear), run(F.linear), strict=True):
        close(got, expected, tolerance)


def test_linear_of_nothing() -> None:
    assert linear(torch.ones(0, 3), torch.ones(2, 3)).shape == (0, 2)
    assert linear(torch.ones(4, 3), torch.ones(0, 3)).shape == (4, 0)


def test_linear_of_a_frozen_weight_and_a_strided_input() -> None:
    x = leaf(6, 8)
    out = linear(x.t(), torch.ones(3, 6))
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((6, 8), 3.0))


def reference(qkv: Tensor) -> Tensor:
    q, k, v = qkv.transpose(1, 2).unbind(3)
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("length", [1, 3, 4, 10, 33, 513])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)], ids=str
)
def test_causal_attention(length: int, dtype: torch.dtype, tolerance: float) -> None:
    given, exact = leaf(2, length, 3, 3, 5, dtype=dtype), leaf(2, length, 3, 3, 5, dtype=dtype).double().detach()
    exact.requires_grad_()
    grad = leaf(2, length, 15, seed=4).detach()
    out, expected = causal_attention(*given.unbind(3)), reference(exact)
    out.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).double())
    assert out.dtype == given.grad.dtype == dtype
    close(out.double(), expected, tolerance)
    close(given.grad.double(), exact.grad, tolerance)


def test_a_token_never_sees_a_later_one() -> None:
    qkv = leaf(1, 20, 2, 3, 4).detach()
    changed = qkv.clone()
    changed[:, 12:] += 1
    before, after = (causal_attention(*each.unbind(3)) for each in (qkv, changed))
    assert torch.equal(before[:, :12], after[:, :12])


def test_the_gradient_of_a_frequent_token_does_not_stagnate() -> None:
    table = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.zeros(4096, dtype=torch.int64), table).sum().backward()
    assert table.grad is not None
    assert table.grad[0].tolist() == [4096.0] * 4
    assert table.grad[1:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding(dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 4, 4], [0, 1, 4]])
    tables = [leaf(6, 5, dtype=dtype) for _ in range(2)]
    grad = leaf(2, 3, 5, dtype=dtype, seed=3).detach()
    out = [function(ids, table) for function, table in zip((embedding, F.embedding), tables, strict=True)]
    for each in out:
        each.backward(grad)
    assert torch.equal(*out)
    close(tables[0].grad, tables[1].grad, 1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_linear_obeys_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.ones(2, 3), torch.ones(4, 3)).dtype == torch.bfloat16


def test_later() -> None:
    assert later(2, 4, torch.device("cpu")).tolist() == [[False, False, False, True], [False] * 4]
