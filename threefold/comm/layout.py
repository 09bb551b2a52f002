"""Ranks and their coordinates on the axes of the mesh: pure arithmetic, without processes.

Axes are ordered from the slowest to the fastest varying (row-major): rank = ((dp·PP + pp)·CP + cp)·TP + tp.
Tensor-parallel neighbors are therefore adjacent ranks, which launchers place on one host.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from math import gcd, prod
from typing import Any, Final, NamedTuple, Self

from threefold.config.schedules import SCHEDULES as ROWS
from threefold.config.schedules import is_custom_schedule
from threefold.config.schema import ParallelConfig
from threefold.errors import UserError

AXES = ("dp", "pp", "cp", "tp")


class Coordinates(NamedTuple):
    """Index of a rank on each axis."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Number of ranks along each axis of the mesh.

    Args:
        dp: data-parallel replicas.
        tp: shards of each weight.
        pp: pipeline stages.
        cp: parts of each sequence (context parallelism).
        ep: neighboring replicas that share the experts of each layer; a divisor of dp, not a further factor.

    Raises:
        UserError: an axis is smaller than 1, or ep does not divide dp.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> Self:
        """Return the layout of a config's `parallel` section."""
        return cls(parallel.dp, parallel.tp, parallel.pp, parallel.cp, parallel.ep)

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            if self.size(axis) < 1:
                raise UserError(f"parallel.{axis} is {self.size(axis)} but must be at least 1; use 1.")
        if self.dp % self.ep:
            nearest = gcd(self.ep, self.dp)
            raise UserError(f"parallel.ep is {self.ep} but must divide parallel.dp {self.dp}; use {nearest}.")

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
        """Raise a `UserError` if `world_size`, whose source is `because`, is not the number of this layout's ranks."""
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
        """Return the index of `rank` on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, cp, tp)

    def rank_of(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates."""
        return ((dp * self.pp + pp) * self.cp + cp) * self.tp + tp

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along `axes`, each in the order of those axes (row-major)."""
        inner, others = (self._places([name for name in AXES if (name in axes) == is_in]) for is_in in (True, False))
        return [[self.rank_of(**outer, **place) for place in inner] for outer in others]

    def model_groups(self) -> list[list[int]]:
        """Return the groups that hold one copy of the model each: `ep` neighboring replicas, with all pp, cp and tp."""
        size = self.ep * self.pp * self.cp * self.tp
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def shard_groups(self, shards: int) -> list[list[int]]:
        """Return the groups that each shard one copy of the weights, over `shards` neighboring dp replicas."""
        size = shards * self.cp
        return [group[i : i + size] for group in self.groups("dp", "cp") for i in range(0, len(group), size)]

    def copy_groups(self, shards: int) -> list[list[int]]:
        """Return the groups of ranks that hold the same shard of the weights, as `shard_groups` shards them."""
        size = shards * self.cp
        return [group[i::size] for group in self.groups("dp", "cp") for i in range(size)]

    def expert_groups(self) -> list[list[int]]:
        """Return the groups of neighboring replicas that share the experts, one rank of each replica."""
        return [group[i : i + self.ep] for group in self.groups("dp") for i in range(0, len(group), self.ep)]

    def expert_copy_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold the same experts and process other tokens."""
        found = []
        for group in self.groups("dp", "cp"):
            replicas = [group[i : i + self.cp] for i in range(0, len(group), self.cp)]
            found += [[rank for held in replicas[i :: self.ep] for rank in held] for i in range(self.ep)]
        return found

    def expert_shard_groups(self, shards: int) -> list[list[int]]:
        """Return the groups that each shard one copy of some experts; `shards` replicas share the other weights."""
        size = max(1, shards // self.ep) * self.cp
        return [group[i : i + size] for group in self.expert_copy_groups() for i in range(0, len(group), size)]

    def expert_shard_copy_groups(self, shards: int) -> list[list[int]]:
        """Return the groups of ranks with the same shard of the same experts, as `expert_shard_groups` shards them."""
        size = max(1, shards // self.ep) * self.cp
        return [group[i::size] for group in self.expert_copy_groups() for i in range(size)]

    def _places(self, axes: Sequence[str]) -> list[dict[str, int]]:
        sizes = (range(self.size(name)) for name in axes)
        return [dict(zip(axes, place, strict=True)) for place in product(*sizes)]

    def __str__(self) -> str:
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp}" + "".join(
            f" · {axis} {self.size(axis)}" for axis in ("cp", "ep") if self.size(axis) > 1
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


SCHEDULES: tuple[str, ...] = tuple(ROWS)
NUMBERS = {
    "zero": "parallel.zero",
    "shards": "parallel.zero_shards",
    "chunks": "parallel.stage_chunks",
    "accumulation": "train.gradient_accumulation_steps",
}
"""Words that take a number → the setting that they set."""
_AXES = ("dp", "tp", "pp", "cp", "ep")
_AXIS = re.compile(rf"({'|'.join(_AXES)})=?(\d+)")
_AXIS_LIST = re.compile(rf"(({'|'.join(_AXES)})=?\d+x?)+")
_NUMBER = re.compile(rf"({'|'.join(NUMBERS)})[=-]?(\d+)")
_OWN_SCHEDULE = re.compile(r"(?<!\S)schedule=(\S+\.csv|\S+:\S+)(?!\S)", re.IGNORECASE)
_SEPARATORS = re.compile(r"[\s,·×:+*/]+")
_EXAMPLE = "dp2·tp2·pp2 zbv zero1 sp"


@dataclass(frozen=True)
class LayoutSpec:
    """Layout with the settings (`section.key`, value) that differ from the default, in the order of `ORDER`."""

    layout: Layout
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(sorted(self.settings, key=lambda item: ORDER.index(item[0]))))

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of `section.key` if it is set here, else `default`."""
        return dict(self.settings).get(key, default)

    @property
    def axes(self) -> str:
        """Axes whose size is above 1, such as `dp2·tp2·pp2`."""
        sizes = [(axis, self.layout.size(axis)) for axis in _AXES]
        return "·".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "dp1"

    @property
    def options(self) -> str:
        """Settings, in the words that `parse` reads."""
        return " ".join(_word(key, value) for key, value in self.settings)

    def __str__(self) -> str:
        return f"{self.axes} {self.options}".strip()


ORDER = (
    "parallel.cp_method",
    "parallel.schedule",
    "parallel.stage_chunks",
    "parallel.zero",
    "parallel.zero_shards",
    "parallel.sequence_parallel",
    "train.recompute",
    "train.gradient_accumulation_steps",
)
RECOMPUTE = ("selective", "full")


def parse(text: str) -> LayoutSpec:
    """Parse one layout: axes with sizes, and words such as `zbv`, `zero3`, `sp`, `full` (recompute), in any order.

    Spaces, commas, colons, `·`, `×` or `+` separate words; `=` before a number is optional. A custom pipeline schedule
    is `schedule=PATH.csv` or `schedule=PATH.py:NAME`, with spaces around it.
    """
    sizes: dict[str, int] = {}
    settings: dict[str, Any] = {}
    for key, value in _facts(text):
        known = sizes if key in _AXES else settings
        if key in known:
            raise UserError(f"The layout {text!r} sets {key} twice; once is enough, as in {_EXAMPLE!r}.")
        known[key] = value
    if not sizes:
        raise UserError(f"The layout {text!r} names no axis; write one such as {_EXAMPLE!r}.")
    return LayoutSpec(Layout(**sizes), tuple(settings.items()))


_WORDS: Final = {
    **{name: ("parallel.schedule", name) for name in SCHEDULES},
    **{f"schedule={name}": ("parallel.schedule", name) for name in SCHEDULES},
    **{mode: ("train.recompute", mode) for mode in RECOMPUTE},
    **{f"recompute={mode}": ("train.recompute", mode) for mode in RECOMPUTE},
    "ring": ("parallel.cp_method", "ring"),
    "sp": ("parallel.sequence_parallel", True),
}
"""Words without a number → the setting and its value."""


def _facts(text: str) -> Iterator[tuple[str, Any]]:
    yield from (("parallel.schedule", found[1]) for found in _OWN_SCHEDULE.finditer(text))
    for word in filter(None, _SEPARATORS.split(_OWN_SCHEDULE.sub(" ", text).strip().lower())):
        if _AXIS_LIST.fullmatch(word):
            yield from ((axis, int(size)) for axis, size in _AXIS.findall(word))
        elif number := _NUMBER.fullmatch(word):
            yield NUMBERS[number[1]], int(number[2])
        elif word in _WORDS:
            yield _WORDS[word]
        else:
            others = "zero1 zero2 zero3 sp ring recompute=full recompute=selective chunks2"
            known = [*SCHEDULES, *others.split()]
            close = get_close_matches(word, [*known, *(f"{axis}2" for axis in _AXES)], n=1, cutoff=0.3)
            raise UserError(
                f"The layout {text!r} has {word!r}, which is neither an axis such as dp2 nor one of "
                f"{', '.join(known)}; the nearest is {close[0] if close else 'dp2'}."
            )


def _word(key: str, value: Any) -> str:
    if key == "parallel.schedule" and is_custom_schedule(value):
        return f"schedule={value}"
    if key in ("parallel.schedule", "parallel.cp_method", "train.recompute"):
        return str(value)
    if key == "parallel.sequence_parallel":
        return "sp"
    return f"{next(word for word, meant in NUMBERS.items() if meant == key)}{value}"


def shard_bounds(size: int, shards: int, index: int) -> tuple[int, int]:
    """Return the start and end of a shard, as `torch.chunk` splits: the last one may be short or empty."""
    step = -(-size // shards)
    return min(index * step, size), min((index + 1) * step, size)
