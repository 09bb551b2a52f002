"""Column-parallel layers that gather features, as a rank's share of them is no equal part of the weight's rows.

Such are queries, keys and values one after another in one layer; and queries, keys and values where the tensor axis has
more ranks than there are key-value heads (GQA). Each key-value head is then repeated on the ranks that share it, which
divide among them the queries that it serves.

The weight is stored and updated as that of any column-parallel layer, in equal parts without a copy, so checkpoints,
ZeRO and gradient norms know nothing of it. What the ranks exchange are features: they gather them after the product,
and reduce-scatter their gradients before its backward pass, which adds up those of the repeated parts. So does
Megatron-LM (`num_query_groups` below the tensor-parallel size), over the whole axis.
"""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.collectives import gather_shares
from threefold.comm.layout import shard_bounds
from threefold.comm.mesh import Axis
from threefold.models.sharding import Unit
from threefold.parallel.tensor.layers import ColumnParallelLinear


class ConcatenatedLinear(ColumnParallelLinear):
    """A column-parallel layer of whose output each of several groups of features, one after another, is split over the
    axis: a rank's queries, then its keys, then its values. Made by `from_groups`.

    Attributes:
        groups: how many there are.
        features: of the whole layer.
    """

    groups: int
    features: int

    @classmethod
    def from_groups(cls, module: nn.Linear, axis: Axis, groups: int, *, sequence_dim: int | None = None) -> Self:
        """The same weight and bias, split.

        Args:
            module: the whole layer.
            axis: the tensor axis.
            groups: divides the output features.
            sequence_dim: as for `ColumnParallelLinear`.
        """
        layer = cls.from_linear(module, axis, gather_output=False, sequence_dim=sequence_dim)
        layer.groups, layer.features = groups, module.out_features
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] as for `ColumnParallelLinear` → [..., this rank's share of each group]."""
        features = _gathered(super().forward(input), -(-self.features // self.axis.size), self.axis)
        size = self.features // self.groups
        start, end = shard_bounds(size, self.axis.size, self.axis.index)
        return torch.cat([features.narrow(-1, size * each + start, end - start) for each in range(self.groups)], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.groups} groups"


def _gathered(out: Tensor, longest: int, axis: Axis) -> Tensor:
    """The features of all ranks in their order, and zeros after them.

    Args:
        out: of this rank; the last ranks may have fewer than the others.
        longest: how many the others have.
        axis: the ranks.
    """
    if out.shape[-1] < longest:
        out = F.pad(out, (0, longest - out.shape[-1]))
    return gather_shares(out, axis, -1)


class GroupedHeadsLinear(ColumnParallelLinear):
    """A column-parallel layer of whose units each is shared by several ranks: some of its parts are divided among them,
    the others repeated. Made by `from_units`.

    Attributes:
        unit: of the output features.
        sharing: the ranks whose features are gathered: those of one unit, or all of the axis.
        longest: features of a rank; the last ones may have fewer.
    """

    unit: Unit
    sharing: Axis
    longest: int

    @classmethod
    def from_units(
        cls, module: nn.Linear, axis: Axis, unit: Unit, sharing: Axis | None, *, sequence_dim: int | None = None
    ) -> Self:
        """The same weight and bias, split.

        Args:
            module: the whole layer.
            axis: the tensor axis, of a multiple of `unit.count` ranks.
            unit: of the output features.
            sharing: the neighbouring ranks that share a unit; None to gather over the whole axis, as is done anyway
                where the rows of a unit cannot be divided equally.
            sequence_dim: as for `ColumnParallelLinear`.
        """
        layer = cls.from_linear(module, axis, gather_output=False, sequence_dim=sequence_dim)
        layer.unit, layer.longest = unit, -(-module.out_features // axis.size)
        divides = module.out_features % axis.size == 0
        layer.sharing = sharing if sharing is not None and divides else axis
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., in] as for `ColumnParallelLinear` → [..., this rank's share of a unit]."""
        return self._own(_gathered(super().forward(input), self.longest, self.sharing))

    def _own(self, features: Tensor) -> Tensor:
        """Of the gathered features, this rank's share of its unit."""
        ranks = self.axis.size // self.unit.count
        number, index = divmod(self.axis.index, ranks)
        start = number * self.unit.size if self.sharing.size > ranks else 0
        pieces = []
        for name, size in self.unit.parts:
            if name in self.unit.repeated:
                pieces.append(features.narrow(-1, start, size))
            else:
                pieces.append(features.narrow(-1, start + index * (size // ranks), size // ranks))
            start += size
        return torch.cat(pieces, -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, a unit on {self.axis.size // self.unit.count} ranks"
