"""What setting a mesh up costs: a rank makes its own process groups alone, and waits for others once for all memory."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import ModelConfig
from threefold.cpu import shared_memory
from threefold.models.gpt.sharding import gpt_plan
from threefold.parallel.pipeline.partition import StageMap
from threefold.parallel.pipeline.stage import TiedWeights
from threefold.planner.dry_run import FakeMesh
from threefold.torch_private.fake import fake_process_group

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8, "vocab_size": 16}
PLAN = gpt_plan(ModelConfig.model_validate(SIZES | {"tie_embeddings": True}), 4)


def stages_of(pp: int) -> StageMap:
    """A layer each and the rest on the last stage; of a long pipeline some stages are empty."""
    end = len(PLAN.layers)
    return StageMap((*(min(place, end - 1) for place in range(pp)), end), tuple(range(pp)))


def noting(calls: list[Any], call: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **options: Any) -> Any:
        calls.append(note(*args))
        return call(*args, **options)

    return noted


@pytest.mark.parametrize(
    ("layout", "rank", "tied"),
    [
        (Layout(dp=16, tp=8, pp=8), 0, [2]),
        (Layout(dp=16, tp=8, pp=8), 8, []),  # the second stage, of which the tied weights are not
        (Layout(dp=128, pp=8), 1023, [2]),
        (Layout(dp=256, tp=2, pp=2), 5, []),  # the stages are all of the pipeline, whose group there is
    ],
    ids=str,
)
def test_the_groups_of_a_thousand_ranks(layout: Layout, rank: int, tied: list[int]) -> None:
    asked: list[None] = []
    made: list[int] = []
    new_group, helper = dist.new_group, c10d._new_process_group_helper
    with fake_process_group(rank, layout.world_size):
        mesh = FakeMesh(layout)
        with (
            patch.object(dist, "new_group", noting(asked, new_group, lambda *_: None)),
            patch.object(
                c10d, "_new_process_group_helper", noting(made, helper, lambda size, index, ranks, *_: len(ranks))
            ),
        ):
            TiedWeights(PLAN, stages_of(layout.pp), mesh)
            assert made == tied
            of_model = mesh.check_group
            copies = mesh.new_axis("copies", layout.copy_groups(2))
            assert copies is not None
            assert [of_model.size, copies.size] == [layout.world_size // layout.dp, layout.dp // 2]
            assert made == [*tied, of_model.size, copies.size]
            assert not asked, "groups that each of the ranks makes"


def set_up(layout: Layout) -> tuple[list[int], list[int], list[float]]:
    """How many groups this rank sets shared memory up for at once, in turn: with the mesh, and further axes; and sums
    over the latter."""
    together: list[int] = []
    share = shared_memory.share
    with patch.object(shared_memory, "share", noting(together, share, lambda groups, _: len(groups))):
        mesh = Mesh(layout)
        of_mesh = [*together]
        ranks = range(layout.world_size)
        axes = [mesh.new_axis("some", [[1, 2]]), mesh.new_axis("pairs", [[one, one + 1] for one in ranks[::2]])]
        axes.append(mesh.new_axis("single", [[one] for one in ranks]))
    sums = [float(axis.all_reduce(torch.tensor(mesh.rank + 1.0))) for axis in axes if axis is not None]
    return of_mesh, together[len(of_mesh) :], sums


def test_the_memory_of_all_axes_is_set_up_at_once(pool) -> None:
    for rank, (of_mesh, further, sums) in enumerate(pool.run(4, set_up, Layout(dp=2, tp=2))):
        assert of_mesh == [3], "world, dp and tp"
        assert further == ([1, 1] if rank in (1, 2) else [1])
        pair = 2 * (rank // 2 * 2) + 3.0
        assert sums == [*([5.0] if rank in (1, 2) else []), pair, rank + 1.0]
    of_mesh, *_ = pool.run(4, set_up, Layout(dp=2, cp=2, ep=2))[0]
    assert of_mesh == [6], "world, dp, cp, both together, ep, and the ranks with the same experts"


def test_a_mesh_that_is_gone_keeps_no_memory(pool) -> None:
    """Mapped memory, while the process group of the ranks goes on."""
    for before, during, after in pool.run(2, _mapped_by_meshes):
        assert before == after < during


def _mapped_by_meshes() -> tuple[int, int, int]:
    def mapped() -> int:
        gc.collect()
        return sum("/threefold-" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before, mesh = mapped(), Mesh(Layout(tp=2))
    mesh.tp.broadcast_(torch.ones(3), 1)
    during = mapped()
    del mesh
    return before, during, mapped()
