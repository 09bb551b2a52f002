"""Placements: every element of a whole tensor in one piece of one rank."""

from math import prod

import pytest
import torch

from threefold_parity import Placement, flat_range, fused, shard, whole
from threefold_parity.placement import Piece
from threefold_parity.text import UserError


def put(whole_tensor: torch.Tensor, mine: torch.Tensor, placement: Placement) -> None:
    """Put a rank's pieces into the whole tensor, each element once."""
    for piece in placement.pieces:
        box = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True))
        assert bool(whole_tensor[box].isnan().all())
        whole_tensor[box] = piece.of(mine)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (4, 3, 5), (2, 1, 3, 2)], ids=str)
def test_flat_ranges_are_their_boxes(shape: tuple[int, ...]) -> None:
    count = prod(shape)
    expected = torch.arange(count, dtype=torch.float64).view(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            found = torch.full(shape, torch.nan, dtype=torch.float64)
            put(found, expected.flatten()[start:stop], flat_range(shape, start, stop))
            inside = (expected >= start) & (expected < stop)
            assert torch.equal(found[inside], expected[inside])
            assert bool(found[~inside].isnan().all())


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shards_make_up_the_whole(dim: int, blocks: int) -> None:
    expected = torch.arange(12 * 24.0, dtype=torch.float64).view(12, 24)
    found = torch.full_like(expected, torch.nan)
    for index in range(2):
        parts = [block.chunk(2, dim)[index] for block in expected.chunk(blocks, dim)]
        mine = torch.cat(parts, dim)
        put(found, mine, shard(mine, dim, index, 2, blocks=blocks))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_parts_of_a_fused_tensor_are_whole_ones(dim: int) -> None:
    mine = torch.arange(12 * 24.0, dtype=torch.float64).view(12, 24)
    sizes = {"q": mine.shape[dim] // 2, "k": 1, "v": mine.shape[dim] // 2 - 1}
    parts = mine.split(list(sizes.values()), dim)
    for (name, _), part, placement in zip(sizes.items(), parts, fused(mine, sizes, dim), strict=True):
        found = torch.full_like(part, torch.nan)
        put(found, mine, placement)
        assert (placement.name, placement.shape) == (name, tuple(part.shape))
        assert torch.equal(found, part)


def test_a_whole_tensor_is_one_piece() -> None:
    assert whole(torch.zeros(3, 2), copy=4) == Placement((3, 2), (Piece((0, 0), (0, 0), (3, 2)),), copy=4)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: shard(torch.zeros(4, 2), 2, 0, 2), r"dim 2 of a tensor with 2 dims; use 1\."),
        (lambda: shard(torch.zeros(4, 2), 0, 2, 2), r"index 2 of 2 shards; use 0 to 1\."),
        (lambda: shard(torch.zeros(4, 2), 0, 0, 2, blocks=3), r"blocks 3, which do not divide the 4 of dim 0"),
        (lambda: fused(torch.zeros(4, 2), {"q": 2, "k": 1}), r"sizes that add up to 3, but dim 0 of the tensor has 4"),
        (lambda: fused(torch.zeros(4, 2), {"q": 2}, 2), r"parity.fused got dim 2 of a tensor with 2 dims; use 1\."),
        (lambda: flat_range((4, 2), 3, 9), r"3 to 9 of a tensor with 8 elements"),
        (lambda: Placement((4,), (Piece((0,), (3,), (2,)),)), r"starts at \(3,\) with size \(2,\)"),
    ],
)
def test_wrong_placements_are_one_sentence(call, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        call()
