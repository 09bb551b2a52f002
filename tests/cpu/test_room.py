"""A run without the room: gloo's own groups, with the same sums and the same record of collectives."""

from unittest.mock import patch

import pytest
import torch

from threefold import doors
from threefold.comm import mesh
from threefold.comm.axis import Event
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.launch import worker


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
