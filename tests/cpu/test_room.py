"""A run without the room: gloo's own groups and torch's own kernels, with the same sums and record of collectives."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.ops.attention import numbered
from tests.support.parity import LLAMA, make_engine, shard_of, trained
from threefold import doors
from threefold.comm import mesh
from threefold.comm.axis import Event
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.launch import worker
from threefold.models.layers import attention as layers
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import SampleInfo
from threefold.ops import attention
from threefold.ops.tiles import whole_tiles
from threefold.parallel import context
from threefold.random.dropout import sample_keys


def sums(with_room: bool) -> tuple[bool, list[bytes], list[Event]]:
    """Whether the axis of two ranks shares memory, the bytes of its results, and the record."""
    with patch.object(mesh, "hook", mesh.hook if with_room else lambda name: None):
        axis = Mesh(Layout(tp=2)).tp
    mine = torch.arange(1, 1001) / 7 * (axis.index + 1)
    with axis.recorder.recording() as events, torch.no_grad():
        found = [axis.all_reduce(mine), axis.all_gather_equal(mine, 0), axis.reduce_scatter(mine, 0)]
        found.append(axis.all_reduce_max_(mine.clone()))
    return axis.shares_memory, [bytes(each.numpy()) for each in found], events


def test_the_mesh_needs_no_room(pool) -> None:
    shared, alone = pool.run(2, sums, True), pool.run(2, sums, False)
    assert [ranks[0][0] for ranks in (shared, alone)] == [True, False]
    assert [each[1:] for each in shared] == [each[1:] for each in alone]
    assert len(alone[0][2]) == 4


def test_gloo_between_gpus_needs_the_room() -> None:
    with patch.object(doors, "hook", lambda name: None), pytest.raises(UserError) as caught:
        worker.staged_backend()
    assert str(caught.value) == (
        "parallel.backend gloo on GPUs needs threefold.cpu, which is not installed; install it, or leave that out."
    )


def attended(with_room: bool, dropout: float, window: int, kind: str, other: bool) -> list[Tensor]:
    """The output of attention, with grouped heads, and the gradients of queries, keys, values and sinks."""
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(3, 70, heads, 6, generator=draw).double().requires_grad_() for heads in (4, 2, 2)]
    other_scores: dict[str, Any] = {"softcap": 1.5, "sinks": 4} if other else {}
    core = CausalAttention(dropout, window, "core", **other_scores).double()
    samples = SampleInfo(sample_keys(1, 2, torch.arange(3)), numbered(kind, 3, 70))
    rooms = (
        patch.object(attention, "_TILED", attention._TILED if with_room else None),
        patch.object(layers, "dropped_attention", attention.dropped_attention if with_room else None),
    )
    with rooms[0], rooms[1]:
        out = core(*given, samples)
    out.backward(torch.ones_like(out).cumsum(-1))
    return [out, *(each.grad for each in (*given, *core.parameters()) if each.grad is not None)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("window", "kind", "other"), [(0, "few", False), (9, "none", False), (9, "apart", False), (9, "few", True)]
)
def test_attention_needs_no_room(dropout: float, window: int, kind: str, other: bool) -> None:
    """Windows, documents in one part or several, other scores, and dropout, with a mask of all queries and keys."""
    for ours, theirs in zip(*(attended(room, dropout, window, kind, other) for room in (True, False)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def around_a_ring(with_room: bool) -> list[float]:
    tiles = context._TILES if with_room else whole_tiles
    case = replace(LLAMA.with_layout(1, 1, 1, settings=(("parallel.cp_method", "ring"),)), cp=2, dtype="fp64")
    with patch.object(context, "_TILES", tiles):
        engine = make_engine(case)
        return list(trained(engine, 2, lambda step: shard_of(case, step, engine.mesh.dp.index)).norms)


def test_ring_attention_needs_no_room(pool) -> None:
    assert pool.run(2, around_a_ring, False)[0] == pytest.approx(pool.run(2, around_a_ring, True)[0], rel=1e-12)
