"""Collectives through shared memory: right sums, the same bits everywhere, and an end when a peer dies."""

import multiprocessing
import os
import random
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.sweep import sweep
from threefold.cpu import segments as shared_memory_setup
from threefold.cpu.shared_memory import USUAL_SIZES, SharedMemoryGroup, over_shared_memory
from threefold.errors import PeerLostError

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (1000,), (33, 65), (4099,)]
PAGE = 4096
"""The smallest slot: most shapes above go in several chunks."""


def test_one_rank(pool):
    _check(pool.run(1, _all_operations, PAGE))


@sweep("world_size", [2, 3, 4, 8], quick=(1, 3))
def test_every_operation_dtype_and_shape(pool, world_size):
    _check(pool.run(world_size, _all_operations, PAGE))


@sweep("world_size", [3, 4], quick=(0,))
def test_large_sums_are_shared_out(pool, world_size):
    _check(pool.run(world_size, _large_sums))


@sweep("world_size", [2, 3], quick=(1,))
def test_a_thousand_operations_in_a_row(pool, world_size):
    _check(pool.run(world_size, _random_operations, 1000))


def test_two_axes_at_once(pool):
    for tp_sum, dp_sum in pool.run(4, _two_axes):
        assert (tp_sum, dp_sum) == (1.0, 1.0)


def test_ranks_that_disagree_are_named(pool):
    for message in pool.run(2, _disagree):
        assert "all_reduce_ of 3 elements of torch.float32" in message
        assert "all_gather of 4 elements of torch.float64" in message


def test_gloo_serves_the_rest(pool):
    pool.run(2, _through_gloo)


def test_no_group_across_hosts(pool):
    assert pool.run(2, _on_two_hosts) == [False, False]


def test_without_dev_shm_the_temporary_folder_serves(pool):
    assert pool.run(2, _without_room_in_memory) == [1.0, 1.0]


def test_no_room_at_all_is_no_group(pool):
    assert pool.run(2, _without_room) == [False, False]


def test_nothing_is_left_in_the_file_system(pool):
    for maps in pool.run(2, _mapped_while_open):
        assert maps
        assert all(path.endswith(" (deleted)") for path in maps)
        assert not any(Path(path.removesuffix(" (deleted)")).parent.exists() for path in maps)


def test_a_killed_peer_ends_the_others(tmp_path):
    context = multiprocessing.get_context("fork")
    messages = context.SimpleQueue()
    ranks = [context.Process(target=_outlive, args=(rank, tmp_path / "store", messages)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=60)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]
    assert sorted(messages.get() for _ in range(2)) == [
        "rank 1 ended while rank 0 was in all_reduce_",
        "rank 1 ended while rank 2 was in all_reduce_",
    ]


def test_a_rank_that_does_not_come_is_named(pool):
    assert pool.run(2, _late) == ["rank 0 has waited 0.5 s in all_reduce_ for rank 1", ""]


# -- what the ranks do -------------------------------------------------------------------------------------------------


def _late() -> str:
    impatient = dist.new_group(timeout=timedelta(seconds=0.5))
    (shared,) = over_shared_memory([impatient])
    message = ""
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(3), group=shared)
        except TimeoutError as error:
            message = str(error)
    dist.barrier()
    return message


def _check(fingerprints: list[list[bytes]]) -> None:
    """All ranks computed the same bits."""
    assert all(fingerprint == fingerprints[0] for fingerprint in fingerprints)


def _group(capacity: int = PAGE) -> SharedMemoryGroup:
    (group,) = over_shared_memory([dist.group.WORLD], capacity)
    assert isinstance(group, SharedMemoryGroup)
    return group


def _sum_(group: SharedMemoryGroup, tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


def _max_(group: SharedMemoryGroup, tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return tensor


def _gathered(group: SharedMemoryGroup, tensor: Tensor) -> Tensor:
    """The tensors of all ranks, stacked, by torch's two collectives for them."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group)
    out = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather_single(out.view(-1), tensor.contiguous().view(-1), group)
    assert torch.equal(out, torch.stack(parts))
    return out


def _scattered(group: SharedMemoryGroup, tensor: Tensor) -> Tensor:
    out = torch.empty_like(tensor[0])
    dist.reduce_scatter_single(out.view(-1), tensor.view(-1), group=group)
    return out


def _broadcast_(group: SharedMemoryGroup, tensor: Tensor, source: int) -> Tensor:
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """What the rank with this seed contributes: every rank can say it of every other."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values > 0 if dtype is torch.bool else (values * 5).abs().to(dtype)


def _bits(tensor: Tensor) -> bytes:
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _exact_sum(parts: list[Tensor]) -> Tensor:
    """The sum as promised: in a binary tree, halves in float32 with one rounding, bool by the logical or."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    sums = [part.to(wide) for part in parts]
    while len(sums) > 1:
        paired = [one + other for one, other in zip(sums[::2], sums[1::2], strict=False)]
        sums = paired + sums[2 * len(paired) :]
    return sums[0].to(parts[0].dtype)


def _all_operations(capacity: int) -> list[bytes]:
    group = _group(capacity)
    results = []
    for dtype in DTYPES:
        for number, shape in enumerate(SHAPES):
            parts = [_values(shape, dtype, 100 * number + rank) for rank in range(group.size())]
            results += _one_of_each(group, parts)
    dist.barrier(group)
    group.close()
    return results


def _one_of_each(group: SharedMemoryGroup, parts: list[Tensor]) -> list[bytes]:
    mine, total, source = parts[group.rank()], _exact_sum(parts), group.size() - 1

    summed = _sum_(group, mine.clone())
    assert torch.equal(summed, total)
    strided = torch.stack([mine, mine], dim=-1)[..., 1]  # not contiguous; its neighbour must keep its values
    assert torch.equal(group.sum_of(strided), total)
    assert torch.equal(strided, mine)
    assert torch.equal(_sum_(group, strided), total)

    largest = _max_(group, mine.clone())
    assert torch.equal(largest.double(), torch.stack(parts).double().amax(0))

    gathered = _gathered(group, mine.t() if mine.dim() == 2 else mine)
    assert torch.equal(gathered, torch.stack([part.t() if part.dim() == 2 else part for part in parts]))

    room = mine.new_zeros(group.size(), mine.numel())
    room[group.rank()] = mine.flatten()
    dist.all_gather_single(room.view(-1), room[group.rank()], group)  # from its place in it
    assert torch.equal(room, torch.stack([part.flatten() for part in parts]))

    received = _broadcast_(group, mine.clone(), source)
    assert torch.equal(received, parts[source])

    stacked = torch.stack([mine * (1 + place) for place in range(group.size())])
    scattered = _scattered(group, stacked)
    expected = _exact_sum([part * (1 + group.rank()) for part in parts])
    assert torch.equal(scattered, expected)
    return [_bits(tensor) for tensor in (summed, strided, largest, gathered, received)]


def _large_sums() -> list[bytes]:
    group = _group(USUAL_SIZES.slot)
    results = []
    for dtype in FLOATS:
        elements = USUAL_SIZES.slot // dtype.itemsize
        for count in (elements // 2 + 1, elements + elements // 2 + 1):
            parts = [
                torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(group.size())
            ]
            summed = _sum_(group, parts[group.rank()].clone())
            assert torch.equal(summed, _exact_sum(parts))
            results.append(_bits(summed))
    group.close()
    return results


def _random_operations(count: int) -> list[bytes]:
    group = _group()
    choose = random.Random(0)
    results = []
    for step in range(count):
        dtype, size = choose.choice(DTYPES), choose.choice([0, 1, 5, 300, 2500])
        operation = choose.choice(["sum", "max", "gather", "broadcast", "barrier"])
        parts = [_values((size,), dtype, 10 * step + rank) for rank in range(group.size())]
        mine = parts[group.rank()].clone()
        if operation == "sum":
            assert torch.equal(_sum_(group, mine), _exact_sum(parts))
        elif operation == "max":
            assert torch.equal(_max_(group, mine).double(), torch.stack(parts).double().amax(0))
        elif operation == "gather":
            mine = _gathered(group, mine)
            assert torch.equal(mine, torch.stack(parts))
        elif operation == "broadcast":
            source = choose.randrange(group.size())
            assert torch.equal(_broadcast_(group, mine, source), parts[source])
        else:
            dist.barrier(group)
            mine = torch.empty(0)
        results.append(_bits(mine))
    group.close()
    return results


def _two_axes() -> tuple[float, float]:
    """dp 2 · tp 2: sums along both axes in turn, which must not disturb each other."""
    rank = dist.get_rank()
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp, dp = over_shared_memory([tp_groups[rank // 2], dp_groups[rank % 2]], PAGE)
    assert isinstance(tp, SharedMemoryGroup)
    assert isinstance(dp, SharedMemoryGroup)
    assert (tp.rank(), dp.rank()) == (rank % 2, rank // 2)
    assert dist.get_process_group_ranks(tp) == [rank - rank % 2, rank - rank % 2 + 1]
    for step in range(50):
        tp_sum = _sum_(tp, torch.full((3,), float(rank % 2)))
        dp_sum = _sum_(dp, torch.full((2000,), float(rank // 2)))
        assert torch.equal(_gathered(dp, torch.tensor(rank * step)), torch.tensor([rank % 2, rank % 2 + 2]) * step)
    tp.close()
    dp.close()
    return tp_sum[0].item(), dp_sum[0].item()


def _disagree() -> str:
    group = _group()
    operation, tensor = [
        (_sum_, torch.zeros(3)),
        (_gathered, torch.zeros(4, dtype=torch.float64)),
    ][group.rank()]
    with pytest.raises(RuntimeError) as caught:
        operation(group, tensor)
    dist.barrier()
    group.close()
    return str(caught.value)


def _through_gloo() -> None:
    """What memory does not serve, in turn with what it does: other dtypes, reductions and operations."""
    group = _group()
    other = 1 - group.rank()
    assert _sum_(group, torch.full((2,), 1 + 1j)).eq(2 + 2j).all()
    smallest = torch.tensor([float(group.rank())])
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group)
    assert smallest.item() == 0
    assert _sum_(group, torch.ones(1)).item() == 2
    received = torch.empty(1, 2)
    dist.all_to_all_single(torch.empty(2, 2), torch.zeros(2, 2), group=group)
    work = dist.isend(torch.full((1, 2), float(group.rank())), group=group, group_dst=other)
    dist.recv(received, group=group, group_src=other)
    assert work is not None
    work.wait()
    assert received.eq(other).all()
    found: list[object] = [None, None]
    dist.all_gather_object(found, {"rank": group.rank()}, group)
    assert found == [{"rank": 0}, {"rank": 1}]
    group.close()


def _with_room(parents: list[str]) -> dist.ProcessGroup:
    """A group on a host whose file systems hold files only under `parents`."""
    before = shared_memory_setup._reserve
    places = []

    def reserve(descriptor: int, length: int) -> None:
        places.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not any(places[-1].startswith(parent) for parent in parents):
            raise OSError("no space left")
        before(descriptor, length)

    shared_memory_setup._reserve = reserve
    try:
        return over_shared_memory([dist.group.WORLD], PAGE)[0]
    finally:
        shared_memory_setup._reserve = before


def _without_room_in_memory() -> float:
    group = _with_room([tempfile.gettempdir()])
    assert isinstance(group, SharedMemoryGroup)
    total = _sum_(group, torch.tensor([float(group.rank())]))
    group.close()
    return total.item()


def _without_room() -> bool:
    return isinstance(_with_room([]), SharedMemoryGroup)


def _on_two_hosts() -> bool:
    before = shared_memory_setup.host_name
    shared_memory_setup.host_name = lambda: ("host", f"boot {dist.get_rank()}")
    try:
        return isinstance(over_shared_memory([dist.group.WORLD], PAGE)[0], SharedMemoryGroup)
    finally:
        shared_memory_setup.host_name = before


def _mapped_while_open() -> list[str]:
    """The paths that the memory of groups had, which others' tests make too, as this process's list of its memory has
    them."""
    group = _group()
    dist.barrier()
    lines = Path("/proc/self/maps").read_text().splitlines()
    group.close()
    return sorted({"/" + line.partition("/")[2] for line in lines if "/threefold-" in line})


def _outlive(rank: int, store: Path, messages: "multiprocessing.SimpleQueue[str]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    group = _group()
    for _ in range(20):
        _sum_(group, torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _sum_(group, torch.ones(10))
    except PeerLostError as error:
        messages.put(str(error))
    os._exit(0)
