"""The hash of a tensor's bits: exact, keyed by position, the same however the tensor lies in memory."""

import pytest
import torch
from torch import Tensor

from threefold.exact.tensor_hash import odd_factors
from threefold.resilience.bit_hash import bit_hash, combined

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def value(tensor: Tensor) -> int:
    return int(bit_hash(tensor, torch.device("cpu")))


def test_it_is_the_sum_of_words_times_their_factors() -> None:
    """Over several blocks of the computation, against Python's integers."""
    words = torch.randint(
        -(1 << 31), 1 << 31, (150_001,), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    columns, rows = ((odd_factors(torch.arange(size) + start)).tolist() for start, size in ((1 << 60, 4096), (0, 37)))
    (block,) = odd_factors(torch.tensor([1 << 61])).tolist()
    total = sum(word * columns[place % 4096] * rows[place // 4096] for place, word in enumerate(words.tolist())) * block
    assert value(words) % (1 << 64) == total % (1 << 64)
    assert all(factor % 2 for factor in columns + rows)
    assert len({*columns, *rows}) == 4096 + 37


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    tensor = (torch.randn(9, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    before = value(tensor)
    bits = tensor.view(WORDS[tensor.element_size()])
    found = set()
    for place in range(9):
        for bit in range(1 if dtype == torch.bool else 8 * tensor.element_size()):
            flipped = torch.ones((), dtype=bits.dtype) << bit
            bits[place] ^= flipped
            found.add(value(tensor))
            bits[place] ^= flipped
    assert value(tensor) == before
    assert before not in found
    assert len(found) == 9 * (1 if dtype == torch.bool else 8 * tensor.element_size())


def test_values_that_changed_places_are_found() -> None:
    """Powers of two, whose bits differ in the uppermost alone."""
    tensor = 2.0 ** torch.arange(-20, 20, dtype=torch.float64)
    before = value(tensor)
    for one in range(40):
        for other in range(one):
            swapped = tensor.clone()
            swapped[[one, other]] = swapped[[other, one]]
            assert value(swapped) != before


def test_it_depends_on_values_alone() -> None:
    tensor = torch.randn(70, 130, generator=torch.Generator().manual_seed(3))
    assert value(tensor.t().contiguous().t()) == value(tensor)
    assert value(tensor.requires_grad_()) == value(tensor.detach().clone())
    assert value(torch.tensor(-0.0)) != value(torch.tensor(0.0))
    assert value(torch.empty(0)) == 0


def test_the_order_of_several_hashes_counts() -> None:
    hashes = torch.tensor([3, 5, -7])
    assert combined(hashes) != combined(hashes.flip(0))
