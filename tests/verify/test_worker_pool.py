import gc
import os
import pickle
import signal
import threading
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from threefold.errors import UserError
from threefold.verify.worker_pool import WorkerError, WorkerPool, _collect, _Worker


def _sum_of_ranks(scale: torch.Tensor) -> torch.Tensor:
    total = scale * dist.get_rank()
    dist.all_reduce(total)
    return total


def _identity() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def _backward() -> float:
    x = torch.full((1000, 1000), 2.0, requires_grad=True)
    (x @ x).sum().backward()
    return float(x.grad[0, 0])


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise UserError("parallel.tp is 3")
    dist.barrier()


def _killed(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _spins(rank: int) -> None:
    while dist.get_rank() == rank:
        pass


def _leaves_groups_in_a_cycle() -> None:
    gc.disable()  # no collection by chance
    groups: list[object] = [dist.new_group() for _ in range(3)]
    groups.append(groups)


def _threads_of_gloo() -> int:
    gc.enable()
    names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)


def _unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_come_back_by_rank(pool: WorkerPool, world_size: int) -> None:
    results = pool.run(world_size, _identity)
    assert results == [(rank, world_size, 1) for rank in range(world_size)]


def test_each_run_has_its_own_group(pool: WorkerPool) -> None:
    for world_size in (3, 2, 4):
        expected = torch.full((3,), sum(range(world_size)) * 0.5)
        for result in pool.run(world_size, _sum_of_ranks, torch.full((3,), 0.5)):
            assert torch.equal(result, expected)


def test_no_group_outlives_its_run(pool: WorkerPool) -> None:
    """Each has threads of gloo, one of which wakes a hundred times a second."""
    before = pool.run(2, _threads_of_gloo)
    pool.run(2, _leaves_groups_in_a_cycle)
    # A thread that has just started still has its parent's name: one may be missing on either side, never six.
    assert all(abs(now - then) < 3 for now, then in zip(pool.run(2, _threads_of_gloo), before, strict=True))
    assert all(before)


def test_first_error_is_named_and_the_hanging_are_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 failed: Traceback[\s\S]*_raise_on[\s\S]*parallel.tp is 3") as caught:
        pool.run(4, _raise_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, UserError)
    assert pool.run(4, _identity) == [(rank, 4, 1) for rank in range(4)]


def test_killed_worker_is_named_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 2 failed: its process ended, killed by SIGKILL"):
        pool.run(3, _killed, 2)
    assert pool.run(3, _identity) == [(rank, 3, 1) for rank in range(3)]


def test_workers_stay_clean_whatever_this_process_did(pool: WorkerPool) -> None:
    assert _backward() == 4000.0
    with pytest.raises(WorkerError):
        pool.run(2, _killed, 0)
    assert pool.run(2, _backward) == [4000.0, 4000.0]


def test_result_that_cannot_be_pickled_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="cannot be pickled"):
        pool.run(1, _unpicklable)


def test_world_larger_than_the_pool(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="world_size is 9"):
        pool.run(9, _identity)


@pytest.mark.parametrize(
    ("answering", "message"),
    [
        (1, "rank 1 failed: it has not answered for 0.1 s after rank 0 did, nor have 1 more"),
        (0, "rank 0 failed: no rank of this call has answered for 1.2 s"),
    ],
)
def test_ranks_that_never_answer_are_named(answering: int, message: str) -> None:
    pipes = [Pipe() for _ in range(3)]
    for _, worker in pipes[:answering]:
        worker.send_bytes(pickle.dumps("result"))
    with pytest.raises(WorkerError) as caught:
        _collect([_Worker(0, here) for here, _ in pipes], lambda worker: "", timeout=0.1)
    assert str(caught.value) == message


def _parallel(threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return float(torch.ones(1 << 20)[torch.arange(1 << 20)].sum())
    finally:
        torch.set_num_threads(before)


def test_workers_have_threads_after_the_process_had_some() -> None:
    """A fork would wait forever for threads that only its parent has."""
    assert _parallel(2) == 1 << 20
    with WorkerPool(1, timedelta(seconds=1)) as pool:
        assert pool.run(1, _parallel, 2) == [1 << 20]


def test_it_closes_while_another_child_of_the_process_holds_its_pipe() -> None:
    """As a data loader's worker does, which may outlive the pool."""
    pool = WorkerPool(1)
    child = os.fork()
    if not child:
        signal.pause()
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(timeout=60)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not closing.is_alive()


@pytest.mark.slow
def test_a_rank_that_spins_is_named_and_replaced() -> None:
    with WorkerPool(2, timedelta(seconds=15)) as pool:
        with pytest.raises(WorkerError, match="rank 1 failed: it has not answered for 15 s after rank 0 did"):
            pool.run(2, _spins, 1)
        assert pool.run(2, _identity) == [(rank, 2, 1) for rank in range(2)]
