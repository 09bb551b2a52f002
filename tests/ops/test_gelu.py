"""GELU by its tanh approximation, against torch's own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.compiled import traced
from threefold.ops.gelu import gelu_tanh


def both(x: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Function and gradient, here and by torch in fp64."""
    ours, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    out, expected = gelu_tanh(ours), F.gelu(exact, approximate="tanh")
    out.backward(upper)
    expected.backward(upper.double())
    assert ours.grad is not None
    assert exact.grad is not None
    return out.detach(), expected.detach(), ours.grad, exact.grad


def samples(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (3, 131, 501)], ids=str)  # the last goes over several runs
def test_it_is_torchs_function_and_gradient(shape) -> None:
    out, expected, grad, exact = both(samples(*shape), samples(*shape).cos())
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_as_exact_as_its_dtype(dtype) -> None:
    x, upper = samples(300, 500).to(dtype), samples(300, 500).cos().to(dtype)
    out, expected, grad, exact = both(x, upper)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=2 * step, atol=step / 4)
    # Rounded twice; in fp32 what is left of σ · (1 − σ) · a cubic is the error, as in torch's kernel.
    torch.testing.assert_close(grad.double(), exact, rtol=2 * step, atol=step if dtype != torch.float32 else 50 * step)


def test_far_from_zero_it_is_zero_or_the_identity() -> None:
    x = torch.tensor([-3e18, -1e6, -200.0, 200.0, 1e6, 3e18])
    out, _, grad, _ = both(x, torch.ones(6))
    assert torch.equal(out, x.clamp(min=0))
    assert torch.equal(grad, (x > 0).float())
    assert gelu_tanh(torch.tensor(torch.nan)).isnan()


def test_without_gradients_it_has_the_same_bits_and_keeps_nothing() -> None:
    x = samples(77, 33).float().requires_grad_()
    with torch.no_grad():
        alone = gelu_tanh(x)
    assert alone.grad_fn is None
    assert torch.equal(alone, gelu_tanh(x))


def test_a_transposed_view_is_taken_as_it_is_meant() -> None:
    x = samples(6, 4)
    assert torch.equal(gelu_tanh(x.t()), gelu_tanh(x).t())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_compiled_it_is_the_same_function(dtype) -> None:
    x = samples(5, 7).to(dtype).requires_grad_()
    compiled = torch.compile(gelu_tanh, fullgraph=True)
    out, alone = traced(compiled, x), gelu_tanh(x)
    assert out.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out, alone, rtol=4 * step, atol=step)
    (grad,), (expected,) = (torch.autograd.grad(each, x, torch.ones_like(x)) for each in (out, alone))
    torch.testing.assert_close(grad, expected, rtol=4 * step, atol=4 * step)
