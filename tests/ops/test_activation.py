"""Activation functions."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.compiled import traced
from threefold.ops.kernels import gelu_tanh


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_compiled_gelu_is_the_same_function(dtype) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    x = torch.cat([values.flatten(), torch.tensor([-3e18, -200.0, 0.0, 200.0, 3e18])]).to(dtype).requires_grad_()
    out, expected = traced(torch.compile(gelu_tanh, fullgraph=True), x), F.gelu(x, approximate="tanh")
    assert out.dtype == dtype
    step = max(torch.finfo(dtype).eps, 1e-14)
    torch.testing.assert_close(out, expected, rtol=4 * step, atol=step)
    (grad,), (exact,) = (torch.autograd.grad(each, x, torch.ones_like(x)) for each in (out, expected))
    torch.testing.assert_close(grad, exact, rtol=4 * step, atol=4 * step)
