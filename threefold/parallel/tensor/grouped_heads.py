"""Column-parallel layers whose ranks compute with other rows than they store, so they exchange output features.

Such are queries, keys and values concatenated in one layer; and queries, keys and values with more tensor ranks than
key-value heads (GQA). Each key-value head is then repeated on the ranks that share it, which divide its queries.

The weight is stored and updated like that of any column-parallel layer, in equal parts without copies, so checkpoints,
ZeRO and gradient norms need no special case. The ranks exchange features instead: they gather them after the product,
and reduce-scatter their gradients before its backward pass, which sums those of repeated parts. Megatron-LM does the
same (`num_query_groups` below the tensor-parallel size), over the whole axis.
"""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.axis import gather_shares
from threefold.comm.layout import shard_bounds
from threefold.comm.mesh import Axis
from threefold.models.sharding import Unit
from threefold.parallel.tensor.layers import ColumnParallelLinear


class ConcatenatedLinear(ColumnParallelLinear):
    """Column-parallel layer that splits each of several concatenated groups of output features over the axis.

    A rank gets its queries, then its keys, then its values. Made by `from_groups`.
    """

    groups: int
    features: int

    @classmethod
    def from_groups(cls, module: nn.Linear, axis: Axis, groups: int, *, sequence_dim: int | None = None) -> Self:
        """Split a linear layer whose output features are `groups` groups of equal size."""
        layer = cls.from_linear(module, axis, gather_output=False, sequence_dim=sequence_dim)
        layer.groups, layer.features = groups, module.out_features
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's share of each group, concatenated, from `input` as for `ColumnParallelLinear`."""
        features = _gathered(super().forward(input), -(-self.features // self.axis.size), self.axis)
        size = self.features // self.groups
        start, end = shard_bounds(size, self.axis.size, self.axis.index)
        return torch.cat([features.narrow(-1, size * each + start, end - start) for each in range(self.groups)], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.groups} groups"


def _gathered(out: Tensor, longest: int, axis: Axis) -> Tensor:
    """Gather all ranks' features in order, then zeros; the last ranks may have fewer than `longest`."""
    if out.shape[-1] < longest:
        out = F.pad(out, (0, longest - out.shape[-1]))
    return gather_shares(out, axis, -1)


class GroupedHeadsLinear(ColumnParallelLinear):
    """Column-parallel layer whose units are shared by several ranks, which divide some parts and repeat others.

    Made by `from_units`.

    Attributes:
        sharing: ranks whose features are gathered: those of one unit, or the whole axis.
        longest: number of features of a rank; the last ones may have fewer.
    """

    unit: Unit
    sharing: Axis
    longest: int

    @classmethod
    def from_units(
        cls, module: nn.Linear, axis: Axis, unit: Unit, sharing: Axis | None, *, sequence_dim: int | None = None
    ) -> Self:
        """Split a linear layer over an axis whose size is a multiple of `unit.count`.

        Args:
            sharing: neighbouring ranks that share a unit; None to gather over the whole axis, as also happens if the
                rows of a unit do not divide equally.
        """
        layer = cls.from_linear(module, axis, gather_output=False, sequence_dim=sequence_dim)
        layer.unit, layer.longest = unit, -(-module.out_features // axis.size)
        divides = module.out_features % axis.size == 0
        layer.sharing = sharing if sharing is not None and divides else axis
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's share of a unit from `input` as for `ColumnParallelLinear`."""
        return self._own(_gathered(super().forward(input), self.longest, self.sharing))

    def _own(self, features: Tensor) -> Tensor:
        """Select this rank's share of its unit from the gathered features."""
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
