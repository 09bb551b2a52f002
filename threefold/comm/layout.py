"""Ranks and their coordinates on the axes of the mesh: arithmetic alone, no processes.

The axes are ordered from the slowest to the fastest varying, row-major: rank = ((dp·PP + pp)·CP + cp)·TP + tp.
Tensor-parallel neighbours are therefore adjacent ranks, which launchers put on one host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import NamedTuple, Self

from threefold.config.schema import ParallelConfig
from threefold.errors import UserError

AXES = ("dp", "pp", "cp", "tp")


class Coordinates(NamedTuple):
    """The position of a rank on each axis."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """The size of each axis of the mesh.

    Args:
        dp: data-parallel replicas.
        tp: shards of each weight.
        pp: pipeline stages.
        cp: parts of each sequence (context parallelism).
        ep: neighbouring replicas that share the experts of each layer; a divisor of dp, not a further factor.

    Raises:
        UserError: an axis is smaller than 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        """The layout of a config's settings."""
        return cls(parallel.dp, parallel.tp, parallel.pp, parallel.cp, parallel.ep)

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            if self.size(axis) < 1:
                raise UserError(f"parallel.{axis} is {self.size(axis)} but must be at least 1; use 1.")

        if self.dp % self.ep:
            rule = f"must divide parallel.dp {self.dp}; use {gcd(self.ep, self.dp)}"
            raise UserError(f"parallel.ep is {self.ep} but {rule}.")

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

    def require_world(self, world_size: int, because: str = "") -> None:
        """Check that `world_size` is the number of ranks of this layout.

        Args:
            because: what says that the world has so many, with how to start alone; empty where the caller knows.

        Raises:
            UserError: it is not.
        """
        if world_size == self.world_size:
            return
        fixed, why = self.tp * self.pp * self.cp, f" ({because})" if because else ""
        if world_size % fixed:
            nearest = max(1, round(world_size / fixed)) * fixed
            product = "tp · pp" if self.cp == 1 else "tp · pp · cp"
            raise UserError(
                f"The world has {_ranks(world_size)}{why}, not a multiple of {product} = {fixed}; start "
                f"{_ranks(nearest)}."
            )
        raise UserError(
            f"The layout {self} needs {_ranks(self.world_size)} but the world has {world_size}{why}; "
            f"set parallel.dp to {world_size // fixed} or start {_ranks(self.world_size)}."
        )

    def coordinates(self, rank: int) -> Coordinates:
        """Position of `rank` on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, cp, tp)

    def rank_of(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates."""
        return ((dp * self.pp + pp) * self.cp + cp) * self.tp + tp

    def groups(self, *axes: str) -> list[list[int]]:
        """The groups of ranks that differ along `axes` alone, each in the order of those axes (row-major)."""
        inner = [name for name in AXES if name in axes]
        others = [name for name in AXES if name not in axes]
        return [[self.rank_of(**outer, **place) for place in self._places(inner)] for outer in self._places(others)]

    def model_groups(self) -> list[list[int]]:
        """The groups of ranks that together hold one copy of the model: `ep` neighbouring replicas, with all their pp,
        cp and tp ranks."""
        size = self.ep * self.pp * self.cp * self.tp
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def shard_groups(self, shards: int) -> list[list[int]]:
        """The groups of ranks that share one copy of the weights when `shards` neighbouring dp replicas do."""
        size = shards * self.cp
        return [group[i : i + size] for group in self.groups("dp", "cp") for i in range(0, len(group), size)]

    def copy_groups(self, shards: int) -> list[list[int]]:
        """The groups of ranks that then hold the same shard of the weights."""
        size = shards * self.cp
        return [group[i::size] for group in self.groups("dp", "cp") for i in range(size)]

    def expert_groups(self) -> list[list[int]]:
        """The groups of neighbouring replicas that share the experts, one rank of each."""
        return [group[i : i + self.ep] for group in self.groups("dp") for i in range(0, len(group), self.ep)]

    def expert_copy_groups(self) -> list[list[int]]:
        """The groups of ranks that hold the same experts and process other tokens."""
        found = []
        for group in self.groups("dp", "cp"):
            replicas = [group[i : i + self.cp] for i in range(0, len(group), self.cp)]
            found += [[rank for held in replicas[i :: self.ep] for rank in held] for i in range(self.ep)]
        return found

    def expert_shard_groups(self, shards: int) -> list[list[int]]:
        """The groups of ranks that share one copy of some experts when `shards` neighbouring replicas share a copy of
        the other weights."""
        size = max(1, shards // self.ep) * self.cp
        return [group[i : i + size] for group in self.expert_copy_groups() for i in range(0, len(group), size)]

    def expert_shard_copy_groups(self, shards: int) -> list[list[int]]:
        """The groups of ranks that then hold the same shard of the same experts."""
        size = max(1, shards // self.ep) * self.cp
        return [group[i::size] for group in self.expert_copy_groups() for i in range(size)]

    def _places(self, axes: Sequence[str]) -> list[dict[str, int]]:
        """Every combination of coordinates along `axes`, row-major."""
        sizes = (range(self.size(name)) for name in axes)
        return [dict(zip(axes, place, strict=True)) for place in product(*sizes)]

    def __str__(self) -> str:
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp}" + "".join(
            f" · {axis} {self.size(axis)}" for axis in ("cp", "ep") if self.size(axis) > 1
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
