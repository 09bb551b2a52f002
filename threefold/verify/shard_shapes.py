"""Shapes of the shards of a model that a rank holds, computed without tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from threefold.comm.layout import Coordinates, shard_bounds
from threefold.config.schema import ParallelConfig
from threefold.models.sharding import OverExperts, Split


@dataclass(frozen=True)
class ShardIndex:
    """Index of one of `count` parts."""

    index: int = 0
    count: int = 1

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Return the start and end of this part of the indices from `start` to `end`."""
        first, last = shard_bounds(end - start, self.count, self.index)
        return start + first, start + last


class ShardCoordinates(NamedTuple):
    """Coordinates of a rank on the axes that shard weights.

    With ZeRO, `zero` is the index among the ranks that hold shards of one copy, `zero_experts` among those of them that
    have the same experts.
    """

    tp: ShardIndex = ShardIndex()
    ep: ShardIndex = ShardIndex()
    zero: ShardIndex = ShardIndex()
    zero_experts: ShardIndex = ShardIndex()

    @property
    def unshared(self) -> "ShardCoordinates":
        """ShardCoordinates without ZeRO, which describes a gathered parameter."""
        return self._replace(zero=ShardIndex(), zero_experts=ShardIndex())


def shard_coordinates(parallel: ParallelConfig, at: Coordinates) -> ShardCoordinates:
    """Return a rank's coordinates on the axes that shard weights, from those in the mesh and a resolved config."""
    zero = experts = ShardIndex()
    if parallel.zero:
        shards = parallel.zero_shards * parallel.cp
        zero = ShardIndex((at.dp * parallel.cp + at.cp) % shards, shards)
        copies = max(1, parallel.zero_shards // parallel.ep) * parallel.cp
        experts = ShardIndex((at.dp // parallel.ep * parallel.cp + at.cp) % copies, copies)
    return ShardCoordinates(ShardIndex(at.tp, parallel.tp), ShardIndex(at.dp % parallel.ep, parallel.ep), zero, experts)


def local_shape(shape: Sequence[int], split: Split, parameter: str, place: ShardCoordinates) -> tuple[int, ...]:
    """Return the shape of a weight's shard on the rank at `place`; `parameter` is its name in the module."""
    return tuple(end - start for start, end in local_bounds(shape, split, parameter, place))


def local_bounds(
    shape: Sequence[int], split: Split, parameter: str, place: ShardCoordinates
) -> tuple[tuple[int, int], ...]:
    """Return the start and end of a weight's shard in each dim of the whole weight; arguments as for `local_shape`."""
    bounds = [(0, size) for size in shape]
    for axis, dim in split.cuts(parameter):
        bounds[dim] = getattr(place, axis).within(*bounds[dim])
    if isinstance(split, OverExperts) and place.ep.count > 1:
        dim = split.uncut_dim(parameter)
        bounds[dim] = place.zero_experts.within(*bounds[dim])
    elif bounds:
        bounds[0] = place.zero.within(*bounds[0])
    return tuple(bounds)
