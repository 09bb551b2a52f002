"""What a record keeps of a tensor: put together from pieces, it is that of the whole one."""

from itertools import pairwise

import pytest
import torch
from parity_support import kept_of

from threefold_parity.placement import flat_range, shard, whole
from threefold_parity.sketch import COPY, PARAMETER, SAMPLE, WHOLE, Detail, Kept, grid, keep, length

SHAPES = [(), (7,), (5000,), (100, 90), (6, 50, 40), (3, 4), (300, 2)]


@pytest.mark.parametrize("detail", [PARAMETER, SAMPLE, COPY, WHOLE], ids=["parameter", "sample", "copy", "whole"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_make_up_the_whole(shape: tuple[int, ...], detail: Detail) -> None:
    tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, found = kept_of(tensor, detail), Kept.empty(shape, detail)
    count = tensor.numel()
    cuts = [0, count // 3, min(count // 2 + 1, count), count]
    for start, stop in pairwise(cuts):
        for piece in flat_range(shape, start, stop).pieces:
            values = keep(piece.of(tensor.reshape(-1)[start:stop])[None], shape, piece, detail)
            assert values.shape == (1, length(shape, piece, detail))
            found.add(piece, values[0])
    assert found.covered == count
    assert found.squares == pytest.approx(float(tensor.square().sum()))
    for mine, theirs in zip(found.vectors, expected.vectors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("detail", [PARAMETER, SAMPLE], ids=["parameter", "sample"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_whole_tensor_in_a_lower_detail(shape: tuple[int, ...], detail: Detail) -> None:
    tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, expected = kept_of(tensor, WHOLE).lowered(detail), kept_of(tensor, detail)
    assert found.squares == pytest.approx(expected.squares)
    for mine, theirs in zip(found.vectors, expected.vectors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_ranks_sums_are_added() -> None:
    parts = torch.randn(2, 40, 130, dtype=torch.float64)
    found = Kept.empty((40, 130), PARAMETER)
    (piece,) = whole(parts[0]).pieces
    for part in parts:
        found.add(piece, keep(part[None], (40, 130), piece, PARAMETER)[0], partial=True)
    for mine, theirs in zip(found.vectors, kept_of(parts.sum(0), PARAMETER).vectors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_every_element_has_a_part_in_what_is_kept() -> None:
    """Also those outside the grid: a change of any one shows in a projection."""
    tensor = torch.randn(130, 70, dtype=torch.float64)
    before = kept_of(tensor, PARAMETER)
    for row, column in ((0, 0), (129, 69), (64, 3), (77, 41)):
        another = tensor.clone()  # adding 1 and subtracting it would leave another number
        another[row, column] += 1
        after = kept_of(another, PARAMETER)
        changed = [
            (a != b).nonzero()[:, 0].tolist() for a, b in zip(before.projections, after.projections, strict=True)
        ]
        assert changed == [[row], [column]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_copy_keeps_elements_that_the_first_has(shape: tuple[int, ...]) -> None:
    for few, many in zip(grid(shape, COPY), grid(shape, PARAMETER), strict=True):
        assert set(few.tolist()) <= set(many.tolist())


def test_a_shard_has_its_part_of_the_grid() -> None:
    tensor = torch.zeros(256, 512)
    for index in range(8):
        (piece,) = shard(tensor.chunk(8)[index], 0, index, 8).pieces
        rows = grid((256, 512), PARAMETER)[0]
        assert ((rows >= piece.start[0]) & (rows < piece.start[0] + 32)).sum() >= 4
