"""Gloo through copies on the CPU: each collective gives what gloo gives, here with copies of tensors of the CPU."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.devices import AllStaged, staged_on
from threefold.cpu.staged import StagedGroup
from threefold.torch_private.distributed import process_group_timeout

RANKS = 3


def mine(rank: int, *shape: int) -> Tensor:
    """Small integers, so that sums are exact."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


def collectives() -> dict[str, Tensor]:
    """What each of torch's collectives gives this rank."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    own = mine(rank, 2 * size, 3)
    for name, call in {
        "all_reduce": lambda x: dist.all_reduce(x),
        "all_reduce_max": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
        "broadcast": lambda x: dist.broadcast(x, 1),
        "reduce": lambda x: dist.reduce(x, 2) if rank == 2 else (dist.reduce(x.clone(), 2), x.zero_()),
    }.items():
        call(found.setdefault(name, own.clone()))
    started = dist.all_reduce(found.setdefault("started", own.clone()), async_op=True)
    assert started is not None
    assert started.wait()
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own)
    found["all_gather"] = torch.stack(gathered)
    found["all_gather_single"] = own.new_empty(size * own.numel())
    dist.all_gather_single(found["all_gather_single"], own.view(-1))
    found["reduce_scatter_single"] = own.new_empty(2 * 3)
    dist.reduce_scatter_single(found["reduce_scatter_single"], own.view(-1))
    found["reduce_scatter"] = own.new_empty(2, 3)
    dist.reduce_scatter(found["reduce_scatter"], [each.contiguous() for each in own.chunk(size)])
    found["all_to_all"] = torch.empty_like(own)
    dist.all_to_all_single(found["all_to_all"], own)
    found["scatter"] = own.new_empty(2, 3)
    dist.scatter(found["scatter"], [each.contiguous() for each in own.chunk(size)] if rank == 0 else None, 0)
    targets = [torch.empty_like(own) for _ in range(size)] if rank == 1 else None
    dist.gather(own, targets, 1)
    found["gather"] = torch.stack(targets) if targets else own.new_zeros(0)
    found["received"] = torch.empty_like(own)
    there, source = (rank + 1) % size, (rank - 1) % size
    operations = [dist.P2POp(dist.isend, own, there), dist.P2POp(dist.irecv, found["received"], source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return found | functional(own)


def functional(own: Tensor) -> dict[str, Tensor]:
    """Collectives as operators, which torch.compile makes of a user's calls."""
    size, name = dist.get_world_size(), dist.group.WORLD.group_name
    wait = torch.ops._c10d_functional.wait_tensor
    return {
        "functional all_reduce": wait(torch.ops._c10d_functional.all_reduce(own, "sum", name)),
        "functional all_gather": wait(torch.ops._c10d_functional.all_gather_into_tensor(own, size, name)),
        "functional reduce_scatter": wait(torch.ops._c10d_functional.reduce_scatter_tensor(own, "sum", size, name)),
    }


def test_each_collective_gives_what_gloo_gives(pool) -> None:
    expected = pool.run(RANKS, collectives)
    got = pool.run(RANKS, staged_on, "cpu", collectives)
    for rank, (theirs, ours) in enumerate(zip(expected, got, strict=True)):
        assert theirs.keys() == ours.keys()
        different = [name for name, tensor in theirs.items() if not tensor.equal(ours[name])]
        assert not different, f"rank {rank}"


def under_way() -> None:
    """What is read is copied when a collective starts, what is written when it is waited for."""
    rank = dist.get_rank()
    own, arrived = torch.full((4,), float(rank)), torch.full((4,), -1.0)
    works = [dist.isend(own, 1 - rank), dist.irecv(arrived, 1 - rank)]
    own.fill_(7)
    works[0].wait()
    assert arrived.eq(-1).all()
    works[1].wait()
    assert arrived.eq(1 - rank).all()


def test_copies_are_made_at_the_start_and_the_end(pool) -> None:
    pool.run(2, staged_on, "cpu", under_way)


def on_the_cpu(path: str) -> tuple[float, list[str]]:
    group = StagedGroup(dist.FileStore(path, 1), 0, 1, timedelta(seconds=77))
    tensor = torch.ones(3)
    assert not group.is_staged(tensor)
    assert group.is_staged(tensor.to("meta"))
    assert not issubclass(type(group), AllStaged)
    return process_group_timeout(group), [device.type for device in group._device_types]


def test_tensors_of_the_cpu_go_straight_to_gloo(pool, tmp_path) -> None:
    assert pool.run(1, on_the_cpu, str(tmp_path / "store")) == [(77.0, ["cpu"])]
