"""Canaries for the private parts of torch that compute attention of tiles."""

import pytest
import torch
from torch.nn import functional as F

from threefold.torch_private.runtime import cpu_attention, cpu_attention_backward, softmax_gradient


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_cpu_attention(dtype: torch.dtype, causal: bool) -> None:
    """Grouped heads, a bias of two dims and the gradients, as of the public function."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 10, 6, generator=draw).to(dtype).requires_grad_() for heads in (4, 2, 2))
    bias = torch.zeros(10, 10, dtype=dtype).masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grad = torch.randn(expected.shape, generator=draw).to(dtype)
    expected.backward(grad)
    given = [each.detach() for each in (q, k, v)]
    out, sums = cpu_attention(*given, None if causal else bias, causal)
    found = cpu_attention_backward(grad, *given, out, sums, None if causal else bias, causal)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, expected.detach(), **close, msg="torch's fused attention of a CPU has changed")
    for ours, theirs in zip(found, (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(ours, theirs, **close, msg="its gradients have changed")
    assert sums.shape == (2, 4, 10)
    assert sums.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_softmax_gradient(dtype: torch.dtype) -> None:
    """As autograd has it; 0 where a key is hidden."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, 37, generator=draw).to(dtype).masked_fill(torch.arange(37) > 20, -torch.inf)
    scores.requires_grad_()
    weights = scores.softmax(-1)
    grad = torch.randn(weights.shape, generator=draw).to(dtype)
    weights.backward(grad)
    found = softmax_gradient(grad, weights.detach())
    assert scores.grad is not None
    assert found.dtype == dtype
    assert torch.equal(found, scores.grad), "torch's gradient of softmax has changed"
    assert bool(found[..., 21:].eq(0).all())
