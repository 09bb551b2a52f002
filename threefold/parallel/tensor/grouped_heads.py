"""Queries, keys and values where the tensor axis has more ranks than there are key-value heads (GQA).

Each key-value head is then repeated on the ranks that share it, which divide among them the queries that it serves. The
weight is stored and updated as that of any column-parallel layer, in equal parts without a copy, so checkpoints, ZeRO
and gradient norms know nothing of it. What the ranks of a head exchange are features: they gather them after the
product, and reduce-scatter their gradients before its backward pass, which adds up those of the repeated parts. So does
Megatron-LM (`num_query_groups` below the tensor-parallel size), over the whole axis.
"""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.collectives import gather_shares
from threefold.comm.mesh import Axis
from threefold.models.sharding import Unit
from threefold.parallel.tensor.layers import ColumnParallelLinear


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
        out = super().forward(input)
        if out.shape[-1] < self.longest:
            out = F.pad(out, (0, self.longest - out.shape[-1]))
        return self._own(gather_shares(out, self.sharing, -1))

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
