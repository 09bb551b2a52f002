"""The sum of squares of the gradients."""

import pytest
import torch

from threefold.parallel.gradients import squared_norm


def test_the_norm_of_many_small_numbers_is_exact() -> None:
    """Torch's own sum of ten million squares in fp32 is off in the fourth digit."""
    gradient = torch.randn(10_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().square().sum().item()
    assert squared_norm([gradient[:9], gradient[9:].view(-1, 2)]).item() == pytest.approx(exact, rel=1e-6)
    whole, halves = squared_norm([gradient]).item(), squared_norm(list(gradient.tensor_split(2))).item()
    assert halves == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, (3 << 14) + 5])
def test_every_element_counts_once(size: int, dtype: torch.dtype) -> None:
    """Beside an empty tensor and a matrix; sizes around that of a piece."""
    gradient = torch.zeros(size, dtype=dtype)
    for place in {0, size // 2, size - 1}:
        gradient.zero_()[place] = 3
        got = squared_norm([torch.ones(2, 3, dtype=dtype), gradient, torch.zeros(0, dtype=dtype)])
        assert got.dtype == torch.float64
        assert got.item() == pytest.approx(15.0, rel=1e-6)
