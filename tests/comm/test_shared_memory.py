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
from threefold.comm import segments as shared_memory_setup
from threefold.comm.shared_memory import DEFAULT_CAPACITY, PeerLostError, SharedMemoryGroup

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 3), (1000,), (33, 65), (4099,)]
PAGE = 4096
"""The smallest slot: most shapes above go in several pieces."""


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


def test_unusable_arguments(pool):
    pool.run(2, _unusable_arguments)


def test_no_group_across_hosts(pool):
    assert pool.run(2, _on_two_hosts) == [None, None]


def test_without_dev_shm_the_temporary_folder_serves(pool):
    assert pool.run(2, _without_room_in_memory) == [1.0, 1.0]


def test_no_room_at_all_is_no_group(pool):
    assert pool.run(2, _without_room) == [None, None]


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
    shared = SharedMemoryGroup.try_create(impatient)
    message = ""
    if dist.get_rank() == 0:
        try:
            shared.all_reduce_(torch.ones(3))
        except TimeoutError as error:
            message = str(error)
    dist.barrier()
    return message


def _check(fingerprints: list[list[bytes]]) -> None:
    """All ranks computed the same bits."""
    assert all(fingerprint == fingerprints[0] for fingerprint in fingerprints)


def _group(capacity: int = PAGE) -> SharedMemoryGroup:
    group = SharedMemoryGroup.try_create(dist.group.WORLD, capacity)
    assert group is not None
    return group


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """What the rank with this seed contributes: every rank can say it of every other."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values > 0 if dtype is torch.bool else (values * 5).abs().to(dtype)


def _bits(tensor: Tensor) -> bytes:
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _exact_sum(parts: list[Tensor]) -> Tensor:
    """The sum as promised: in rank order, halves in float32 with one rounding, bool by the logical or."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def _all_operations(capacity: int) -> list[bytes]:
    group = _group(capacity)
    results = []
    for dtype in DTYPES:
        for number, shape in enumerate(SHAPES):
            parts = [_values(shape, dtype, 100 * number + rank) for rank in range(group.size)]
            results += _one_of_each(group, parts)
    group.barrier()
    group.close()
    return results


def _one_of_each(group: SharedMemoryGroup, parts: list[Tensor]) -> list[bytes]:
    mine, total, source = parts[group.index], _exact_sum(parts), group.size - 1

    summed = group.all_reduce_(mine.clone())
    assert torch.equal(summed, total)
    strided = torch.stack([mine, mine], dim=-1)[..., 1]  # not contiguous; its neighbour must keep its values
    assert group.all_reduce_(strided) is strided
    assert torch.equal(strided, total)

    largest = group.all_reduce_max_(mine.clone())
    assert torch.equal(largest.double(), torch.stack(parts).double().amax(0))

    gathered = group.all_gather(mine.t() if mine.dim() == 2 else mine)
    assert torch.equal(gathered, torch.stack([part.t() if part.dim() == 2 else part for part in parts]))

    room = mine.new_zeros(group.size, mine.numel())
    room[group.index] = mine.flatten()
    group.all_gather(room[group.index], room)  # from its place in it
    assert torch.equal(room, torch.stack([part.flatten() for part in parts]))

    received = group.broadcast_(mine.clone(), source)
    assert torch.equal(received, parts[source])

    stacked = torch.stack([mine * (1 + place) for place in range(group.size)])
    scattered = group.reduce_scatter(stacked)
    expected = _exact_sum([part * (1 + group.index) for part in parts])
    assert torch.equal(scattered, expected.unsqueeze(0))
    return [_bits(tensor) for tensor in (summed, strided, largest, gathered, received)]


def _large_sums() -> list[bytes]:
    group = _group(DEFAULT_CAPACITY)
    results = []
    for dtype in FLOATS:
        elements = DEFAULT_CAPACITY // dtype.itemsize
        for count in (elements // 2 + 1, elements + elements // 2 + 1):
            parts = [
                torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(group.size)
            ]
            summed = group.all_reduce_(parts[group.index].clone())
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
        parts = [_values((size,), dtype, 10 * step + rank) for rank in range(group.size)]
        mine = parts[group.index].clone()
        if operation == "sum":
            assert torch.equal(group.all_reduce_(mine), _exact_sum(parts))
        elif operation == "max":
            assert torch.equal(group.all_reduce_max_(mine).double(), torch.stack(parts).double().amax(0))
        elif operation == "gather":
            mine = group.all_gather(mine)
            assert torch.equal(mine, torch.stack(parts))
        elif operation == "broadcast":
            source = choose.randrange(group.size)
            assert torch.equal(group.broadcast_(mine, source), parts[source])
        else:
            group.barrier()
            mine = torch.empty(0)
        results.append(_bits(mine))
    group.close()
    return results


def _two_axes() -> tuple[float, float]:
    """dp 2 · tp 2: sums along both axes in turn, which must not disturb each other."""
    rank = dist.get_rank()
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp = SharedMemoryGroup.try_create(tp_groups[rank // 2], PAGE)
    dp = SharedMemoryGroup.try_create(dp_groups[rank % 2], PAGE)
    assert tp is not None
    assert dp is not None
    assert (tp.index, dp.index, tp.ranks) == (rank % 2, rank // 2, [rank - rank % 2, rank - rank % 2 + 1])
    for step in range(50):
        tp_sum = tp.all_reduce_(torch.full((3,), float(rank % 2)))
        dp_sum = dp.all_reduce_(torch.full((2000,), float(rank // 2)))
        assert torch.equal(dp.all_gather(torch.tensor(rank * step)), torch.tensor([rank % 2, rank % 2 + 2]) * step)
    tp.close()
    dp.close()
    return tp_sum[0].item(), dp_sum[0].item()


def _disagree() -> str:
    group = _group()
    operation, tensor = [
        (group.all_reduce_, torch.zeros(3)),
        (group.all_gather, torch.zeros(4, dtype=torch.float64)),
    ][group.index]
    with pytest.raises(RuntimeError) as caught:
        operation(tensor)
    dist.barrier()
    group.close()
    return str(caught.value)


def _unusable_arguments() -> None:
    group = _group()
    with pytest.raises(ValueError, match=r"dim 0 of shape \[3, 2\] cannot be scattered evenly over 2 ranks"):
        group.reduce_scatter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="source_index 2 is not in a group of 2 ranks"):
        group.broadcast_(torch.zeros(1), 2)
    with pytest.raises(TypeError, match=r"do not support torch\.complex64"):
        group.all_reduce_(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ValueError, match="CPU tensors, got one on meta"):
        group.all_reduce_(torch.zeros(1, device="meta"))
    assert group.all_reduce_(torch.ones(1)).item() == 2, "a refused call leaves the group usable"
    group.close()


def _with_room(parents: list[str]) -> SharedMemoryGroup | None:
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
        return SharedMemoryGroup.try_create(dist.group.WORLD, PAGE)
    finally:
        shared_memory_setup._reserve = before


def _without_room_in_memory() -> float:
    group = _with_room([tempfile.gettempdir()])
    assert group is not None
    total = group.all_reduce_(torch.tensor([float(group.index)]))
    group.close()
    return total.item()


def _without_room() -> SharedMemoryGroup | None:
    return _with_room([])


def _on_two_hosts() -> SharedMemoryGroup | None:
    before = shared_memory_setup._host
    shared_memory_setup._host = lambda: ("host", f"boot {dist.get_rank()}")
    try:
        return SharedMemoryGroup.try_create(dist.group.WORLD, PAGE)
    finally:
        shared_memory_setup._host = before


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
        group.all_reduce_(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce_(torch.ones(10))
    except PeerLostError as error:
        messages.put(str(error))
    os._exit(0)
