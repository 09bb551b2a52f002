"""The mesh of one process that takes itself for a rank of a large layout."""

from collections.abc import Sequence

from torch import Tensor

from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh, PlannedAxis
from threefold.torch_private.fake import FakeTensor, with_memory

LARGE = 1e6
"""What sums of fake numbers are taken for: above any limit that gradients are clipped to."""


class FakeAxis(Axis):
    """An axis whose other ranks have what this one has."""

    def all_reduce_values(self, tensor: Tensor) -> list[float]:
        self.all_reduce_(tensor)
        if isinstance(tensor, FakeTensor):
            return [LARGE] * len(tensor)
        return [self.size * value for value in tensor.tolist()]


class FakeMesh(Mesh):
    """The mesh of a rank of a fake process group."""

    def _new_group(self, name: str, groups: Sequence[Sequence[int]]) -> PlannedAxis | None:
        with with_memory():
            return super()._new_group(name, groups)

    def _axes(self, planned: Sequence[PlannedAxis]) -> list[Axis]:
        return [
            FakeAxis(name, ranks, ranks.index(self.rank), group, self.recorder, device_mesh)
            for name, ranks, group, device_mesh in planned
        ]
