"""Ranks, coordinates and groups."""

import pytest
import torch

from tests.support.sweep import sweep
from threefold.comm.layout import AXES, Layout, shard_bounds
from threefold.comm.mesh import Mesh
from threefold.errors import UserError

SIZES = (1, 2, 4, 8)
FACTORINGS = [
    Layout(dp, tp, 8 // (dp * tp * cp), cp) for dp in SIZES for tp in SIZES for cp in SIZES if dp * tp * cp <= 8
]


@pytest.mark.parametrize("layout", FACTORINGS, ids=str)
def test_rank_is_row_major(layout: Layout) -> None:
    for rank in range(8):
        dp, pp, cp, tp = layout.coordinates(rank)
        assert rank == ((dp * layout.pp + pp) * layout.cp + cp) * layout.tp + tp
        assert rank == layout.rank_of(dp=dp, pp=pp, cp=cp, tp=tp)


@pytest.mark.parametrize("layout", FACTORINGS, ids=str)
@pytest.mark.parametrize("axis", AXES)
def test_groups_differ_along_their_axis_alone(layout: Layout, axis: str) -> None:
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(8))
    for group in groups:
        places = [layout.coordinates(rank)._asdict() for rank in group]
        assert [place.pop(axis) for place in places] == list(range(layout.size(axis)))
        assert all(place == places[0] for place in places)


def test_groups_of_two_by_two_by_two() -> None:
    layout = Layout(2, 2, 2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        (Layout(1, 2, 2), 6, "not a multiple of tp · pp = 4; start 8 ranks"),
        (Layout(2, 2, 2), 4, "set parallel.dp to 1 or start 8 ranks"),
        (Layout(1, 1, 3), 1, "start 3 ranks"),
    ],
)
def test_wrong_world_is_one_sentence(layout: Layout, world: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layout.require_world(world)


def test_axis_below_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"parallel\.tp is 0"):
        Layout(tp=0)


def place(layout: Layout) -> dict[str, object]:
    mesh = Mesh(layout)
    axes = {name: getattr(mesh, name) for name in (*AXES, "world")}
    sums = {name: axis.all_reduce_(torch.tensor([float(mesh.rank)])).item() for name, axis in axes.items()}
    return {
        "rank": mesh.rank,
        "coordinates": mesh.coordinates,
        "ranks": {name: axis.ranks for name, axis in axes.items()},
        "index": {name: axis.index for name, axis in axes.items()},
        "sums": sums,
        "stages": (mesh.pp.is_first, mesh.pp.is_last),
    }


@sweep("layout", [Layout(2, 2, 2), Layout(1, 4, 2), Layout(3, 1, 2), Layout(1, 1, 1)], ids=str, quick=(0, 2))
def test_every_getter_on_every_rank(pool, layout: Layout) -> None:
    for rank, found in enumerate(pool.run(layout.world_size, place, layout)):
        assert found["rank"] == rank
        assert found["coordinates"] == layout.coordinates(rank)
        for axis in AXES:
            group = next(group for group in layout.groups(axis) if rank in group)
            assert found["ranks"][axis] == tuple(group)
            assert found["index"][axis] == group.index(rank) == getattr(layout.coordinates(rank), axis)
            assert found["sums"][axis] == sum(group)
        assert found["sums"]["world"] == sum(range(layout.world_size))
        stage = layout.coordinates(rank).pp
        assert found["stages"] == (stage == 0, stage == layout.pp - 1)


def refusal() -> str:
    try:
        Mesh(Layout(1, 2, 2))
    except UserError as error:
        return str(error)
    return ""


def test_mesh_refuses_a_wrong_world(pool) -> None:
    assert all("not a multiple of tp · pp = 4" in message for message in pool.run(3, refusal))


def test_replicas_that_share_a_copy_of_some_experts() -> None:
    """Of eight replicas, two for each half of the experts in a group of four; or four parts, whole on each rank."""
    layout = Layout(dp=8, ep=2)
    assert layout.expert_shard_groups(4) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert layout.expert_shard_copy_groups(4) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    layout = Layout(dp=8, ep=4)
    assert layout.expert_shard_groups(2) == [[rank] for rank in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert layout.expert_shard_copy_groups(2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    layout = Layout(dp=4, ep=2, cp=2)
    assert layout.expert_shard_groups(2) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert layout.expert_shard_copy_groups(2) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_groups_of_replicas_that_share_experts_and_shards() -> None:
    """Neighbors share; ranks with the same part are as far apart as the parts are many."""
    layout = Layout(dp=4, tp=2, ep=2)
    assert layout.expert_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert layout.expert_copy_groups() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert layout.model_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Layout(dp=4).shard_groups(2) == [[0, 1], [2, 3]]
    assert Layout(dp=4).copy_groups(2) == [[0, 2], [1, 3]]
    assert Layout(dp=6).copy_groups(2) == [[0, 2, 4], [1, 3, 5]]


def test_shards_that_do_not_divide_are_those_of_torch_chunk() -> None:
    for size in range(12):
        for shards in (1, 2, 3, 4, 7):
            chunks = torch.arange(size).chunk(shards) if size else ()
            expected = [(int(each[0]), int(each[-1]) + 1) for each in chunks if len(each)]
            bounds = [shard_bounds(size, shards, index) for index in range(shards)]
            assert bounds == expected + [(size, size)] * (shards - len(expected))


def test_experts_are_shared_by_a_divisor_of_the_replicas() -> None:
    with pytest.raises(UserError, match=r"^parallel\.ep is 4 but must divide parallel\.dp 6; use 2\.$"):
        Layout(dp=6, ep=4)
