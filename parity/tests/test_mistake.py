"""The shape of a mistake, said of the tensor that it makes."""

from collections.abc import Callable

import pytest
import torch
from parity_support import kept_of
from torch import Tensor

from threefold_parity.mistake import Factors, shape_of
from threefold_parity.sketch import PARAMETER

FACTORS = Factors({"dp": 4, "tp": 2, "micro-batches": 3, "valid tokens": 1021})


def swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2)
    return torch.cat([second, first])


def without(x: Tensor, shard: int, count: int, dim: int = 0) -> Tensor:
    parts = [torch.zeros_like(part) if at == shard else part for at, part in enumerate(x.chunk(count, dim))]
    return torch.cat(parts, dim)


def scaled(x: Tensor, shard: int, count: int, factor: float) -> Tensor:
    return torch.cat([part * factor if at == shard else part for at, part in enumerate(x.chunk(count))])


SHAPES: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: 2 * x, "is 2 (tp) times the reference"),
    (lambda x: x / 3, "is 1/3 (1 / micro-batches) times the reference"),
    (lambda x: 1021 * x, "is 1021 (valid tokens) times the reference"),
    (lambda x: 8 * x, "is 8 (dp · tp) times the reference"),
    (lambda x: x / 16, "is 1/16 (1 / dp²) times the reference"),
    (lambda x: 1.01 * x, "is 1.01 times the reference"),
    (lambda x: -x, "is -1 times the reference"),
    (torch.zeros_like, "is zero"),
    (lambda x: x * torch.nan, "is not finite"),
    (swapped, "has shards along dim 0 (of 2) in the order 1, 0"),
    (lambda x: without(x, 1, 2), "lacks shard 1 of 2 along dim 0 (zero)"),
    (lambda x: without(x, 2, 4, dim=1), "lacks shard 2 of 4 along dim 1 (zero)"),
    (lambda x: scaled(x, 0, 2, 0.5), "has shard 0 of 2 along dim 0 at 1/2 (1 / tp) times the reference"),
    (lambda x: x.view(3, -1, x.shape[1]).transpose(0, 1).reshape(x.shape), "has 3 blocks along dim 0 interleaved"),
    (
        lambda x: x.view(-1, 3, x.shape[1]).transpose(0, 1).reshape(x.shape),
        "has 3 interleaved blocks along dim 0 one after the other",
    ),
    (lambda x: x.T.contiguous(), "is the transpose of the reference"),
    (lambda x: torch.roll(x, 1, 0), "is shifted by one place along dim 0"),
]


@pytest.mark.parametrize("size", [24, 120], ids=["whole", "sketched"])
@pytest.mark.parametrize(("mistake", "said"), SHAPES, ids=[said for _, said in SHAPES])
def test_the_shape_is_said(mistake: Callable[[Tensor], Tensor], said: str, size: int) -> None:
    right = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.3
    found = shape_of(kept_of(mistake(right), PARAMETER), kept_of(right, PARAMETER), FACTORS, 1e-9)
    assert found == said


@pytest.mark.parametrize("size", [24, 120], ids=["whole", "sketched"])
def test_nothing_is_said_of_another_difference(size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    right, other = (torch.randn(size, size, dtype=torch.float64, generator=generator) for _ in range(2))
    assert shape_of(kept_of(right + 0.3 * other, PARAMETER), kept_of(right, PARAMETER), FACTORS, 1e-9) is None


def test_factors_of_one_size_are_both_named() -> None:
    assert Factors({"dp": 2, "cp": 2}).name(2.0) == "2 (dp or cp)"
