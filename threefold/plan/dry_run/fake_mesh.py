"""The mesh of one process that takes itself for a rank of a large layout."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh
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
    """The mesh of a rank of a fake process group. Groups that this rank is not in are not made."""

    def new_axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis | None:
        mine = next((tuple(ranks) for ranks in groups if self.rank in ranks), None)
        if mine is None:
            return None
        with with_memory():
            return self._axis(name, mine, dist.new_group(list(mine)) if len(mine) > 1 else None)

    def _axis(
        self, name: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None = None
    ) -> Axis:
        return FakeAxis(name, ranks, ranks.index(self.rank), group, self.recorder, device_mesh)
