"""Sums of an exact run's mesh have the same bits over shared memory, over sockets, and by hand."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.devices import staged_on
from threefold.comm.axis import Axis, Event
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.cpu.shared_memory import SharedMemorySizes
from threefold.exact.products import tree_sum

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LENGTHS = (1, 3, 64, 1013)
"""Numbers of elements, most of which do not divide by the ranks."""


def parts_of(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Summand of each rank, of widely different magnitudes, so that every other order has other bits."""
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randn(dist.get_world_size(), *shape, dtype=torch.float64, generator=generator)
    scales = torch.randn(numbers.shape, dtype=torch.float64, generator=generator).mul(2).exp()
    return list((numbers * scales).to(dtype))


def by_hand(parts: list[Tensor]) -> Tensor:
    return tree_sum(part.clone() for part in parts)


def exact_axis(transport: str) -> Axis:
    layout, sizes = Layout(tp=dist.get_world_size()), SharedMemorySizes(4096, 4096)  # more than one chunk, and parts
    axis = Mesh(layout, shared_memory=transport == "memory", in_tree=True, sizes=sizes).tp
    assert axis.in_tree
    assert axis.shares_memory == (transport == "memory")
    return axis


def sum_in_tree(transport: str) -> None:
    axis = exact_axis(transport)
    for dtype in DTYPES:
        for length in LENGTHS:
            parts = parts_of(dtype, length)
            total, mine = by_hand(parts), parts[axis.index]
            assert axis.all_reduce(mine).equal(total)
            assert mine.equal(parts_of(dtype, length)[axis.index])
            assert axis.all_reduce_(mine.clone()).equal(total)
            assert axis.all_reduce_values(mine.clone()) == total.tolist()
            # Together with another tensor, whose size changes the position; and of a view, in place.
            other, view, double = parts_of(dtype, 5, 3), mine.clone(), mine * 2
            joined = [torch.stack([mine, mine], 1)[:, 1], other[axis.index].clone().T]
            axis.all_reduce_together_(joined)
            assert joined[0].equal(total)
            assert joined[1].equal(by_hand(other).T)
            with axis.recorder.recording() as events:
                works = [axis.start_all_reduce_(each) for each in (view, double)]
                for work in works:
                    assert work is not None
                    axis.finish_all_reduce(work)
            assert view.equal(total)
            assert double.equal(2 * total)
            assert events == [Event("tp", "all_reduce", mine.nbytes)] * 2
    counts = torch.tensor([axis.index, 1 << 40])
    assert axis.all_reduce_(counts).tolist() == [sum(range(axis.size)), axis.size << 40]


def scatter_in_tree(transport: str) -> None:
    axis = exact_axis(transport)
    for dtype in DTYPES:
        parts = parts_of(dtype, 3, 8, 67)
        total, mine = by_hand(parts), parts[axis.index]
        with axis.recorder.recording() as events:
            assert axis.reduce_scatter(mine, 1).equal(total.chunk(axis.size, 1)[axis.index])
        assert events == [Event("tp", "reduce_scatter", mine.nbytes)]


WORKS = [sum_in_tree, scatter_in_tree]


@pytest.mark.parametrize("transport", ["memory", "sockets"])
@pytest.mark.parametrize("work", WORKS)
def test_sums_of_eight_ranks(pool, work: Callable[[str], None], transport: str) -> None:
    pool.run(8, work, transport)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_of_staged_tensors(pool, ranks: int, work: Callable[[str], None]) -> None:
    pool.run(ranks, staged_on, "cpu", work, "sockets")


def sum_in_another_order() -> list[bool]:
    """Whether sums of an inexact mesh, of both transports, are those by hand."""
    found = []
    for shared_memory in (True, False):
        axis = Mesh(Layout(tp=dist.get_world_size()), shared_memory=shared_memory).tp
        parts = parts_of(torch.bfloat16 if shared_memory else torch.float32, 1013)
        found.append(axis.all_reduce(parts[axis.index]).equal(by_hand(parts)))
    return found


def test_another_mesh_has_other_bits(pool) -> None:
    """Shared memory rounds bf16 once, and gloo adds in a ring: these tests would see either."""
    assert pool.run(4, sum_in_another_order) == [[False, False]] * 4
