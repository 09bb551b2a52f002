"""What the ranks of an axis do together, over shared memory and over sockets."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.devices import staged_on
from threefold.comm.axis import Axis, Event
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.exact.totals import sum_exactly

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def part_of(index: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Small integers, so that sums are exact in every dtype."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(index)).to(dtype)


def axis_layout() -> Layout:
    return Layout(tp=torch.distributed.get_world_size())


def axis_over(transport: str) -> Axis:
    axis = Mesh(axis_layout()).tp
    assert axis.shares_memory
    return axis if transport == "memory" else Mesh(axis_layout(), shared_memory=False).tp


def gather_objects(transport: str) -> None:
    """Of lengths that differ, one beyond a slot of the memory."""
    axis = axis_over(transport)
    values = ["", {"step": 3, "text": "ü" * 1_500_000}, torch.arange(7)]
    with axis.recorder.recording() as events:
        first, second, third = axis.gather_objects(values[axis.index])
    assert [first, second] == values[:2]
    assert torch.equal(third, values[2])
    assert events == []


@pytest.mark.parametrize("transport", ["memory", "sockets"])
def test_gathered_objects(pool, transport: str) -> None:
    pool.run(3, gather_objects, transport)


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


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.transpose(0, 2),
    lambda x: x[:, ::2],
    lambda x: x[1:3, :, 1],
    lambda x: x.flatten()[3::4],
]
"""Non-contiguous views, some of which leave elements of the tensor out."""


def sum_views(transport: str) -> None:
    """Sums and maxima of views in place: torch's collectives may work on a copy of such a tensor and drop it."""
    axis = axis_over(transport)
    for dtype in DTYPES:
        for view in VIEWS:
            parts = [part_of(index, dtype, (4, 3, 5)) for index in range(axis.size)]
            total, largest = view(sum(parts)), view(torch.stack(parts).amax(0))
            outside = torch.ones(4, 3, 5, dtype=torch.bool)
            view(outside).fill_(False)
            for sums, expected in ((True, total), (False, largest)):
                whole = parts[axis.index].clone()
                seen = view(whole)
                assert not seen.is_contiguous()
                assert (axis.all_reduce_ if sums else axis.all_reduce_max_)(seen) is seen
                assert seen.equal(expected)
                assert whole[outside].equal(parts[axis.index][outside])
            whole, more = parts[axis.index].clone(), torch.ones(4, 3, 5, dtype=dtype)
            axis.all_reduce_together_([view(whole), view(more)])
            assert view(whole).equal(total)
            assert view(more).eq(axis.size).all()
            assert more[outside].eq(1).all()
            assert axis.all_reduce(view(parts[axis.index])).equal(total)
            assert parts[axis.index].equal(part_of(axis.index, dtype, (4, 3, 5)))


def start_and_finish(transport: str) -> None:
    """Sums that have been started, with others of the axis before they are waited for."""
    axis = axis_over(transport)
    for dtype in DTYPES:
        parts = [part_of(index, dtype, (7, 5)) for index in range(axis.size)]
        first, second, third = (parts[axis.index].clone() for _ in range(3))
        with axis.recorder.recording() as events:
            works = [axis.start_all_reduce_(first), axis.start_all_reduce_(second.mul_(2))]
            axis.all_reduce_(third.mul_(3))
            for work in works:
                assert work is not None
                axis.finish_all_reduce(work)
        for factor, summed in enumerate((first, second, third), start=1):
            assert summed.equal(factor * sum(parts))
        assert events == [Event("tp", "all_reduce", 35 * dtype.itemsize)] * 3


def pass_on(transport: str) -> None:
    """All-to-all, shift, broadcast and sends, of views where they may be."""
    axis = axis_over(transport)
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    rows = [part_of(index, torch.float32, (6, 2 * axis.size)).T for index in range(axis.size)]  # two for each rank
    arrived = axis.all_to_all(rows[axis.index], [2] * axis.size, [2] * axis.size)
    assert arrived.equal(torch.cat([each[2 * axis.index : 2 * axis.index + 2] for each in rows]))
    assert axis.start_shift(rows[axis.index])().equal(rows[before])
    sent = rows[1].contiguous() if axis.index == 1 else torch.zeros_like(rows[1]).contiguous()
    assert axis.broadcast_(sent, 1).equal(rows[1])
    received = torch.empty_like(rows[before], memory_format=torch.contiguous_format)
    if axis.index:
        axis.receive_(received, before)
        axis.send(rows[axis.index], after)
    else:
        axis.send(rows[axis.index], after)
        axis.receive_(received, before)
    assert received.equal(rows[before])


def exchange_many_times() -> None:
    """Gloo's threads need the interpreter's lock to free tensors, so nothing may hold it while it waits for them."""
    axis = axis_over("memory")
    x = torch.ones(2 * axis.size, 16)
    for _ in range(1000):
        assert axis.all_to_all(x.clone(), [2] * axis.size, [2] * axis.size).equal(x)
        assert axis.start_shift(x.clone())().equal(x)
        assert axis.all_reduce_(x.clone()).equal(axis.size * x)


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


@pytest.mark.parametrize("transport", ["memory", "sockets"])
@pytest.mark.parametrize("work", [sum_views, pass_on, start_and_finish])
def test_views(pool, work: Callable[[str], None], transport: str) -> None:
    pool.run(3, work, transport)


@pytest.mark.parametrize("work", [gather_and_scatter, sum_views, pass_on])
def test_over_copies_of_the_tensors(pool, work: Callable[[str], None]) -> None:
    pool.run(3, staged_on, "cpu", work, "sockets")


@pytest.mark.slow
def test_sockets_and_memory_in_turn(pool) -> None:
    pool.run(2, exchange_many_times)


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


def sum_behind_requests() -> list[list[tuple[list[float], list[float]]]]:
    """Sums of steps over sockets, without and with further elements in the vector, in a plain and an exact run."""
    axis, found = axis_over("sockets"), []
    for step in range(40):
        generator = torch.Generator().manual_seed(9 * step + axis.index)
        values = [*torch.rand(4, 100, dtype=torch.float64, generator=generator)]
        sums = []
        for more in (0, 1, 7):

            def over_ranks(totals: Tensor, more: int = more) -> list[float]:
                return axis.all_reduce_values(torch.cat([totals, totals.new_zeros(more)]))[: len(totals)]

            plain = over_ranks(torch.stack([each.sum() for each in values]))
            exact, _ = sum_exactly(values, torch.ones(1, dtype=torch.float64), axis, over_ranks)
            sums.append((plain, exact))
        found.append(sums)
    return found


@pytest.mark.parametrize("ranks", [3, 4])
def test_requests_that_travel_with_sums_change_no_bit_of_an_exact_run(pool, ranks: int) -> None:
    """Gloo adds the third and later elements of a longer vector in another order: a plain run's differ by rounding."""
    first, *others = pool.run(ranks, sum_behind_requests)
    assert all(other == first for other in others), "every rank has the same sums"
    for (_, expected), *more in first:
        assert all(exact == expected for _, exact in more)
        assert all(plain == pytest.approx(expected, rel=1e-15) for plain, _ in more)
