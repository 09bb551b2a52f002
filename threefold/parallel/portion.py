"""How much of a weight a rank holds: what `split.py` does to modules, as arithmetic on shapes, without a mesh."""

from collections.abc import Sequence
from typing import NamedTuple

from threefold.parallel.collectives import shard_bounds
from threefold.parallel.split import Column, OverExperts, Row, Split, Vocab

_CUTS: dict[tuple[type, str], tuple[tuple[str, int], ...]] = {
    (Column, "weight"): (("tp", 0),),
    (Column, "bias"): (("tp", 0),),
    (Row, "weight"): (("tp", 1),),
    (Vocab, "weight"): (("tp", 0),),
    (OverExperts, "gate_up"): (("ep", 0), ("tp", 1)),
    (OverExperts, "down"): (("ep", 0), ("tp", 2)),
}
"""Split and parameter of a module → the axes that cut it, and along which dim; others are whole everywhere."""


class Shard(NamedTuple):
    """One of `count` parts."""

    index: int = 0
    count: int = 1


class Place(NamedTuple):
    """A rank's place on the axes that cut weights.

    Attributes:
        tp, ep: as the axes of the mesh.
        zero: among the ranks that share a copy.
    """

    tp: Shard = Shard()
    ep: Shard = Shard()
    zero: Shard = Shard()


def local_shape(shape: Sequence[int], split: Split, parameter: str, place: Place) -> tuple[int, ...]:
    """The part of a weight that the rank at `place` holds.

    Args:
        shape: of the whole weight.
        split: of its module.
        parameter: its name in the module.
        place: where the rank is.
    """
    local = list(shape)
    for axis, dim in _CUTS.get((type(split), parameter), ()):
        local[dim] = _length(local[dim], getattr(place, axis))
    local[0] = _length(local[0], place.zero)
    return tuple(local)


def _length(size: int, shard: Shard) -> int:
    start, end = shard_bounds(size, shard.count, shard.index)
    return end - start
