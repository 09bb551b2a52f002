"""Shapes of a rank's shards of weights: the result of `shard_modules` by arithmetic, without a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from threefold.comm.layout import Coordinates, shard_length
from threefold.config.schema import ParallelConfig
from threefold.models.sharding import OverExperts, Split, matches


@dataclass(frozen=True)
class ShardIndex:
    """Index of one of `count` parts."""

    index: int = 0
    count: int = 1

    def length(self, size: int) -> int:
        """Return the length of this part of a dim."""
        return shard_length(size, self.count, self.index)


class ShardCoordinates(NamedTuple):
    """Coordinates of a rank on the axes that shard weights.

    Attributes:
        tp, ep: coordinates on the tensor axis and the expert axis.
        zero: index among the ranks that hold shards of one copy (ZeRO).
        zero_experts: index among those of them that have the same experts.
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
    local = list(shape)
    for axis, dim in split.cuts(parameter):
        local[dim] = getattr(place, axis).length(local[dim])
    if isinstance(split, OverExperts) and place.ep.count > 1:
        dim = split.uncut_dim(parameter)
        local[dim] = place.zero_experts.length(local[dim])
    else:
        local[0] = place.zero.length(local[0])
    return tuple(local)


def chosen_layers(layers: Sequence[str], patterns: Mapping[str, Sequence[str]], mode: str, every: int = 1) -> list[str]:
    """Return the layers in which `mode` recomputes something, every `every`-th; `patterns` as in `ModelPlan`."""
    if mode == "none":
        return []
    return [layer for layer in layers if any(_is_within(pattern, layer) for pattern in patterns[mode])][::every]


def _is_within(pattern: str, layer: str) -> bool:
    depth = layer.count(".") + 1
    return matches(layer, ".".join(pattern.split(".")[:depth]))
