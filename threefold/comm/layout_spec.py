"""Layouts with their settings as text, such as `dp2·tp2·pp2 zbv zero3 sp`: parsing and printing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from threefold.comm.layout import Layout
from threefold.config.schedules import SCHEDULES as ROWS
from threefold.config.schedules import is_schedule_file
from threefold.errors import UserError

SCHEDULES: tuple[str, ...] = tuple(ROWS)
NUMBERS = {
    "zero": "parallel.zero",
    "shards": "parallel.zero_shards",
    "chunks": "parallel.stage_chunks",
    "accumulation": "train.gradient_accumulation_steps",
}
"""Words with a number → their setting."""
_AXES = ("dp", "tp", "pp", "cp", "ep")
_AXIS = re.compile(rf"({'|'.join(_AXES)})=?(\d+)")
_AXIS_LIST = re.compile(rf"(({'|'.join(_AXES)})=?\d+x?)+")
_NUMBER = re.compile(rf"({'|'.join(NUMBERS)})[=-]?(\d+)")
_SCHEDULE_FILE = re.compile(r"(?<!\S)schedule=(\S+\.csv)(?!\S)", re.IGNORECASE)
_SEPARATORS = re.compile(r"[\s,·×:+*/]+")
_EXAMPLE = "dp2·tp2·pp2 zbv zero1 sp"


@dataclass(frozen=True)
class LayoutSpec:
    """A layout and settings that go with it.

    Attributes:
        layout: ranks along each axis.
        settings: (`section.key`, value) of the settings that are not the default, in the order of `ORDER`.
    """

    layout: Layout
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(sorted(self.settings, key=lambda item: ORDER.index(item[0]))))

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of `section.key`, if it is set here."""
        return dict(self.settings).get(key, default)

    @property
    def axes(self) -> str:
        """`dp2·tp2·pp2`: the axes whose size is above 1."""
        sizes = [(axis, self.layout.size(axis)) for axis in _AXES]
        return "·".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "dp1"

    @property
    def options(self) -> str:
        """The settings, in the words that `parse` reads."""
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


def parse_layouts(texts: list[str]) -> list[LayoutSpec]:
    """Parse several layouts: each text has one, or several separated by `;`; duplicates are dropped.

    Raises:
        UserError: one is malformed.
    """
    parts = [part.strip() for text in texts for part in text.split(";")]
    return list(dict.fromkeys(parse(part) for part in parts if part))


def parse(text: str) -> LayoutSpec:
    """Parse one layout: axes with sizes, and words such as `zbv`, `zero3`, `sp`, `full` (recompute), in any order.

    Words are separated by spaces, commas, colons, `·`, `×` or `+`; `=` before a number is optional. A CSV file of
    pipeline actions is `schedule=PATH.csv`, with spaces around it.

    Raises:
        UserError: a word is unknown, or a setting is given twice.
    """
    sizes: dict[str, int] = {}
    settings: dict[str, Any] = {}
    for key, value in _all_facts(text):
        known = sizes if key in _AXES else settings
        if key in known:
            raise UserError(f"The layout {text!r} sets {key} twice; once is enough, as in {_EXAMPLE!r}.")
        known[key] = value
    if not sizes:
        raise UserError(f"The layout {text!r} names no axis; write one such as {_EXAMPLE!r}.")
    return LayoutSpec(Layout(**sizes), tuple(settings.items()))


def _all_facts(text: str) -> Iterator[tuple[str, Any]]:
    yield from (("parallel.schedule", found[1]) for found in _SCHEDULE_FILE.finditer(text))
    for word in _SEPARATORS.split(_SCHEDULE_FILE.sub(" ", text).strip().lower()):
        if word:
            yield from _facts(word, text)


def _facts(word: str, text: str) -> Iterator[tuple[str, Any]]:
    if _AXIS_LIST.fullmatch(word):
        yield from ((axis, int(size)) for axis, size in _AXIS.findall(word))
    elif number := _NUMBER.fullmatch(word):
        yield NUMBERS[number[1]], int(number[2])
    elif (schedule := word.removeprefix("schedule=")) in SCHEDULES:
        yield "parallel.schedule", schedule
    elif word == "ring":
        yield "parallel.cp_method", "ring"
    elif word == "sp":
        yield "parallel.sequence_parallel", True
    elif (mode := word.removeprefix("recompute=")) in RECOMPUTE:
        yield "train.recompute", mode
    else:
        known = [
            *SCHEDULES,
            "zero1",
            "zero2",
            "zero3",
            "sp",
            "ring",
            "recompute=full",
            "recompute=selective",
            "chunks2",
        ]
        close = get_close_matches(word, [*known, *(f"{axis}2" for axis in _AXES)], n=1, cutoff=0.3)
        nearest = close[0] if close else "dp2"
        raise UserError(
            f"The layout {text!r} has {word!r}, which is neither an axis such as dp2 nor one of {', '.join(known)}; "
            f"the nearest is {nearest}."
        )


def _word(key: str, value: Any) -> str:
    if key == "parallel.schedule" and is_schedule_file(value):
        return f"schedule={value}"
    if key in ("parallel.schedule", "parallel.cp_method", "train.recompute"):
        return str(value)
    if key == "parallel.sequence_parallel":
        return "sp"
    return f"{next(word for word, meant in NUMBERS.items() if meant == key)}{value}"
