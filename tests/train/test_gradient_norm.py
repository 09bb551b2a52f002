"""The sum of squares of the gradients."""

import pytest
import torch

from threefold.train.gradient_norm import squared_norm


def test_the_norm_of_many_small_numbers_is_exact() -> None:
    """Torch's own sum of ten million squares in fp32 is off in the fourth digit."""
    gradient = torch.randn(10_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().square().sum().item()
    assert squared_norm([gradient[:9], gradient[9:].view(-1, 2)]).item() == pytest.approx(exact, rel=1e-6)
    whole, halves = squared_norm([gradient]).item(), squared_norm(list(gradient.tensor_split(2))).item()
    assert halves == pytest.approx(whole, rel=1e-6)
