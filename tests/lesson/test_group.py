"""Collectives between threads, in turns."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from threefold.lesson.group import Exchange
from threefold.lesson.turns import Turns
from threefold.torch_private.threads import thread_groups, thread_rank


def in_threads(size: int, work: Callable[[int], object]) -> list[object]:
    """Return what each rank's `work` returns."""
    turns, store, found = Turns(size), dist.HashStore(), dict[int, object]()

    def run(rank: int) -> None:
        with thread_rank(rank, size, store):
            found[rank] = work(rank)

    with thread_groups(Exchange(turns, lambda *_: lambda _: None).group):
        turns.run(run, here=0)
    return [found[rank] for rank in range(size)]


def test_collectives_are_those_of_a_backend() -> None:
    def work(rank: int) -> list[list[float]]:
        mine = torch.tensor([rank + 1.0, 10.0 * rank])
        sums, largest = mine.clone(), mine.clone()
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        parts = [torch.empty(2) for _ in range(3)]
        dist.all_gather(parts, mine)
        whole, piece = torch.empty(6), torch.empty(2)
        dist.all_gather_into_tensor(whole, mine)
        dist.reduce_scatter_tensor(piece, whole * (rank + 1))
        rows = torch.empty(3)
        dist.all_to_all_single(rows, torch.arange(3.0) + 10 * rank)
        told = mine.clone()
        dist.broadcast(told, 2)
        work = dist.all_reduce(later := mine.clone(), async_op=True)
        assert work is not None
        dist.barrier()
        work.wait()
        return [each.tolist() for each in (sums, largest, torch.cat(parts), whole, piece, rows, told, later)]

    whole = [1.0, 0.0, 2.0, 10.0, 3.0, 20.0]
    for rank, found in enumerate(in_threads(3, work)):
        piece = [6 * value for value in whole[2 * rank : 2 * rank + 2]]
        rows = [rank, 10.0 + rank, 20.0 + rank]
        assert found == [[6, 30], [3, 20], whole, whole, piece, rows, [3, 20], [6, 30]]


def test_messages_arrive_in_the_order_of_the_receives() -> None:
    def work(rank: int) -> list[float]:
        if rank == 0:
            for value in (1.0, 2.0):
                dist.send(torch.tensor([value]), 1)
            return []
        first, second = torch.zeros(1), torch.zeros(1)
        works = [dist.irecv(first, 0), dist.irecv(second, 0)]
        for each in reversed(works):
            assert each is not None
            each.wait()
        return [first.item(), second.item()]

    assert in_threads(2, work) == [[], [1.0, 2.0]]


def test_each_rank_has_generators_of_its_own() -> None:
    def work(rank: int) -> list[float]:
        torch.manual_seed(rank)
        first = torch.rand(1).item()
        dist.barrier()
        return [first, torch.rand(1).item()]

    for rank, found in enumerate(in_threads(2, work)):
        generator = torch.Generator().manual_seed(rank)
        assert found == [torch.rand(1, generator=generator).item() for _ in range(2)]


def test_ranks_that_wait_for_each_other_are_told_of() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), 0)

    with pytest.raises(RuntimeError, match=r"No rank can go on.*rank 0 for barrier.*rank 1 for a tensor of rank 0"):
        in_threads(2, work)


def test_ranks_that_call_different_collectives_are_told_of() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            dist.barrier()
        else:
            dist.all_reduce(torch.zeros(1))

    with pytest.raises(RuntimeError, match=r"rank 1 calls allreduce where another .* calls barrier"):
        in_threads(2, work)
    assert not dist.is_initialized()


def test_the_error_of_one_rank_ends_all() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError
        dist.barrier()

    with pytest.raises(ZeroDivisionError):
        in_threads(3, work)
