"""Activation functions, and gated features."""

import pickle

import pytest
import torch
from torch.nn import functional as F

from tests.support.compiled import traced
from threefold.ops import kernels
from threefold.ops.kernels import gated, gelu_tanh


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


@pytest.mark.parametrize("compiled", [False, True])
def test_gated_pairs_read_as_words_are_those_of_fp32_rounded_once(compiled: bool) -> None:
    """As in compiled code on a GPU."""
    draws = torch.Generator().manual_seed(0)
    pairs, grad = (torch.randn(5, 7, size, generator=draws).bfloat16() * 3 for size in (24, 12))
    pairs[0, 0, :4] = torch.tensor([0.0, -0.0, torch.inf, 2.0])
    pairs.requires_grad_()
    packed = kernels._PackedGated.apply
    out = traced(torch.compile(packed, fullgraph=True), pairs) if compiled else packed(pairs)
    wide = pairs.detach().float().requires_grad_()
    expected = gated(wide)
    assert torch.equal(out, expected.bfloat16())
    (mine,), (right,) = torch.autograd.grad(out, pairs, grad), torch.autograd.grad(expected, wide, grad.float())
    known = ~right.isnan()  # of an infinite gate
    assert known.sum() >= known.numel() - 1
    assert torch.equal(mine[known], right.bfloat16()[known])


@pytest.mark.parametrize("name", kernels.ACTIVATIONS)
def test_an_activation_can_be_pickled(name: str) -> None:
    """As with a module that has it, which `torch.save` writes whole."""
    assert pickle.loads(pickle.dumps(kernels.ACTIVATIONS[name])) is kernels.ACTIVATIONS[name]
