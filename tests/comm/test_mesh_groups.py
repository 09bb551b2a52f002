"""The axes of a mesh with context and expert parallelism: which ranks are in each group, and that they are what sums.

The expected groups are written with the coordinates alone, without the arithmetic of `Layout`.
"""

from collections.abc import Callable
from itertools import product

import torch

from tests.support.sweep import sweep
from threefold.comm.axis import Axis
from threefold.comm.layout import AXES, Layout
from threefold.comm.mesh import Mesh

Place = dict[str, int]

LAYOUTS = [
    Layout(dp=2, cp=2, ep=2),
    Layout(dp=2, pp=2, cp=2, ep=2),
    Layout(dp=2, tp=2, cp=2, ep=2),
    Layout(dp=4, cp=2, ep=2),
    Layout(dp=4, tp=2, ep=2),
    Layout(dp=2, tp=2, pp=2, ep=2),
    Layout(dp=3, cp=2),
    Layout(tp=2, pp=2, cp=2),
]


def places(layout: Layout) -> list[Place]:
    """The coordinates of each rank: dp varies slowest, then pp, cp and tp."""
    sizes = (range(layout.dp), range(layout.pp), range(layout.cp), range(layout.tp))
    return [dict(zip(AXES, each, strict=True)) for each in product(*sizes)]


def alike(*names: str) -> Callable[[Place, Place, Layout], bool]:
    """Whether two ranks have the same coordinates on these axes."""
    return lambda mine, other, layout: all(mine[name] == other[name] for name in names)


def share_experts(mine: Place, other: Place, layout: Layout) -> bool:
    return mine["dp"] // layout.ep == other["dp"] // layout.ep and alike("pp", "cp", "tp")(mine, other, layout)


def hold_the_same_experts(mine: Place, other: Place, layout: Layout) -> bool:
    return mine["dp"] % layout.ep == other["dp"] % layout.ep and alike("pp", "tp")(mine, other, layout)


def share_a_copy_of_two(mine: Place, other: Place, layout: Layout) -> bool:
    """ZeRO over two neighbouring replicas and all their context ranks."""
    return mine["dp"] // 2 == other["dp"] // 2 and alike("pp", "tp")(mine, other, layout)


def hold_the_same_shard_of_two(mine: Place, other: Place, layout: Layout) -> bool:
    return mine["dp"] % 2 == other["dp"] % 2 and alike("pp", "cp", "tp")(mine, other, layout)


GROUPS: dict[str, Callable[[Place, Place, Layout], bool]] = {
    "dp": alike("pp", "cp", "tp"),
    "pp": alike("dp", "cp", "tp"),
    "cp": alike("dp", "pp", "tp"),
    "tp": alike("dp", "pp", "cp"),
    "replicas": alike("pp", "tp"),
    "ep": share_experts,
    "expert_replicas": hold_the_same_experts,
    "world": alike(),
    "shards of two": share_a_copy_of_two,
    "copies of two": hold_the_same_shard_of_two,
}


def found_on_a_rank(layout: Layout) -> dict[str, tuple[tuple[int, ...], int, bool, bool, list[float]]]:
    """Each group as this rank has it: its ranks, this one's index, whether it is the first and the last; and the sum,
    largest and gathered ranks by its collectives."""
    mesh = Mesh(layout)
    axes: dict[str, Axis] = {name: getattr(mesh, name) for name in GROUPS if hasattr(mesh, name)}
    if layout.dp % 2 == 0:
        axes["shards of two"], axes["copies of two"] = mesh.shard_and_replica_axes(2)
    assert mesh.rank == torch.distributed.get_rank()
    assert mesh.coordinates._asdict() == places(layout)[mesh.rank]
    found = {}
    for name, axis in axes.items():
        mine = torch.tensor([float(mesh.rank)])
        gathered = axis.all_gather_equal(mine, 0).tolist()
        used = [axis.all_reduce_(mine.clone()).item(), axis.all_reduce_max_(mine.clone()).item(), *gathered]
        assert axis.size == len(axis.ranks)
        found[name] = (axis.ranks, axis.index, axis.is_first, axis.is_last, used)
    if layout.ep > 1:
        assert mesh.ep.device_mesh is not None
        assert mesh.ep.device_mesh.mesh_dim_names == ("ep", "tp")
        assert tuple(mesh.ep.device_mesh.get_coordinate() or ()) == (
            mesh.coordinates.dp % layout.ep,
            mesh.coordinates.tp,
        )
    return found


@sweep("layout", LAYOUTS, ids=str, quick=(2,))
def test_every_group_on_every_rank(pool, layout: Layout) -> None:
    where = places(layout)
    for rank, found in enumerate(pool.run(layout.world_size, found_on_a_rank, layout)):
        assert found.keys() >= {"dp", "pp", "cp", "tp", "replicas", "ep", "expert_replicas", "world"}
        for name, (ranks, index, is_first, is_last, used) in found.items():
            expected = [other for other in range(len(where)) if GROUPS[name](where[rank], where[other], layout)]
            assert ranks == tuple(expected), name
            assert index == expected.index(rank), name
            assert (is_first, is_last) == (rank == expected[0], rank == expected[-1]), name
            assert used == [sum(expected), max(expected), *expected], name
