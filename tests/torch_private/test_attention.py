"""A canary for the private part of torch that computes attention of tiles on a CPU."""

import pytest
import torch
from torch.nn import functional as F

from threefold.torch_private.attention import cpu_attention, cpu_attention_backward


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
