"""Where each rank sits: pure arithmetic, no processes.

The axes are ordered from the slowest to the fastest varying, row-major: rank = (dp·PP + pp)·TP + tp. Tensor-parallel
neighbours are therefore adjacent ranks, which launchers put on one host.
"""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from threefold.errors import UserError

AXES = ("dp", "pp", "tp")


class Coordinates(NamedTuple):
    """The position of a rank on each axis."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """How many ranks lie along each axis of the mesh.

    Args:
        dp: data-parallel replicas.
        tp: shards of each weight.
        pp: pipeline stages.

    Raises:
        UserError: an axis is smaller than 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise UserError(f"parallel.{axis} is {self.size(axis)} but must be at least 1; use 1.")

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return int(getattr(self, axis))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(self.size(axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return prod(self.shape)

    def require_world(self, world_size: int) -> None:
        """Check that `world_size` ranks are what this layout needs.

        Raises:
            UserError: they are not.
        """
        if world_size == self.world_size:
            return
        fixed = self.tp * self.pp
        named = f"dp {self.dp} · tp {self.tp} · pp {self.pp}"
        if world_size % fixed:
            nearest = max(1, round(world_size / fixed)) * fixed
            raise UserError(
                f"The world has {world_size} ranks, not a multiple of tp · pp = {fixed}; start {nearest} ranks."
            )
        raise UserError(
            f"The layout {named} needs {self.world_size} ranks but the world has {world_size}; "
            f"set parallel.dp to {world_size // fixed} or start {self.world_size} ranks."
        )

    def coordinates(self, rank: int) -> Coordinates:
        """Position of `rank` on each axis."""
        rest, tp = divmod(rank, self.tp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, tp)

    def rank_of(self, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates."""
        return (dp * self.pp + pp) * self.tp + tp

    def groups(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ along `axis` alone, each in the order of that axis."""
        others = [name for name in AXES if name != axis]
        return [
            [self.rank_of(**dict(zip(others, place, strict=True)), **{axis: index}) for index in range(self.size(axis))]
            for place in product(*(range(self.size(name)) for name in others))
        ]

    def __str__(self) -> str:
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp}"
