"""What the ranks of an axis do together, over shared memory and over sockets."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from threefold.comm.axis import Axis, Event
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def part_of(index: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Small integers, so that sums are exact in every dtype."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(index)).to(dtype)


def axis_over(transport: str) -> Axis:
    axis = Mesh(Layout(tp=torch.distributed.get_world_size())).tp
    assert axis.shared is not None
    return axis if transport == "memory" else replace(axis, shared=None)


def gather_and_scatter(transport: str) -> None:
    axis = axis_over(transport)
    for dtype in DTYPES:
        for dim in (0, 1, 2, -1, -2):
            shape = (2, 3, 5)
            parts = [part_of(index, dtype, shape) for index in range(axis.size)]
            with axis.recorder.recording() as events:
                joined = axis.all_gather_equal(parts[axis.index].transpose(0, 1).contiguous().transpose(0, 1), dim)
            assert joined.equal(torch.cat(parts, dim))
            assert events == [Event("tp", "all_gather", axis.size * 30 * dtype.itemsize)]

            wholes = [
                torch.cat([part_of(8 * index + n, dtype, shape) for n in range(axis.size)], dim)
                for index in range(axis.size)
            ]
            with axis.recorder.recording() as events:
                mine = axis.reduce_scatter(wholes[axis.index], dim)
            assert mine.equal(sum(wholes).chunk(axis.size, dim)[axis.index])
            assert events == [Event("tp", "reduce_scatter", axis.size * 30 * dtype.itemsize)]


def scatter_unevenly() -> None:
    axis_over("memory").reduce_scatter(torch.zeros(2, 3), dim=1)


def gather_unevenly() -> int:
    axis = Mesh(Layout(tp=2)).tp
    with axis.recorder.recording() as events:
        axis.all_gather(torch.zeros(4, 3 - axis.index), dim=1)
    return events[0].nbytes


@pytest.mark.parametrize("transport", ["memory", "sockets"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_and_scatter(pool, ranks: int, transport: str) -> None:
    pool.run(ranks, gather_and_scatter, transport)


def test_only_equal_parts_can_be_scattered(pool) -> None:
    with pytest.raises(Exception, match="does not divide into 2 equal parts"):
        pool.run(2, scatter_unevenly)


def test_bytes_are_those_of_the_whole_tensor(pool) -> None:
    assert pool.run(2, gather_unevenly) == [4 * 5 * 4, 4 * 5 * 4]


def test_one_rank_has_nothing_to_do(pool) -> None:
    pool.run(1, alone)


def alone() -> None:
    axis = Mesh(Layout()).tp
    x = torch.ones(2, 3)
    assert axis.all_gather_equal(x, 1) is x
    assert axis.reduce_scatter(x, 1) is x
