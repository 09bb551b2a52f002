"""Ranges of steps, as `data.skip_steps` has them: `[120, 300-320]`."""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from threefold.config.section import MOST_STEPS

_RANGE = re.compile(r"(\d{1,15}) ?- ?(\d{1,15})|(\d{1,15})")
_WRITTEN = "a list of steps and ranges of steps from 1 on, such as [120, 300-320]"


@dataclass(frozen=True)
class StepRanges:
    """A set of steps, 1 being the first.

    Attributes:
        ranges: first and last step of each, in order, none touching another.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "StepRanges":
        """The union of ranges, of which each may be in any place."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, given: Any) -> "StepRanges":
        """The steps of a setting: a list of whole numbers and of ranges as text, or one of either.

        Raises:
            ValueError: what it must be instead, as the end of a sentence.
        """
        entries = given if isinstance(given, list | tuple) else [given]
        return cls.of(_parsed(entry) for entry in entries)

    @property
    def written(self) -> tuple[int | str, ...]:
        """As the setting is written."""
        return tuple(first if first == last else f"{first}-{last}" for first, last in self.ranges)

    def __contains__(self, step: int) -> bool:
        return self.around(step) is not None

    def __str__(self) -> str:
        return ", ".join(str(entry) for entry in self.written)

    def around(self, step: int) -> tuple[int, int] | None:
        """The range that a step is in; None where it is in none."""
        place = bisect_right(self.ranges, (step, MOST_STEPS + 1)) - 1
        return self.ranges[place] if place >= 0 and step <= self.ranges[place][1] else None

    def next_outside(self, step: int) -> int:
        """The first step from `step` on that is in no range."""
        found = self.around(step)
        return step if found is None else found[1] + 1

    def last_outside(self, step: int) -> int:
        """The last step up to `step` that is in no range; 0 where there is none."""
        found = self.around(step)
        return step if found is None else found[0] - 1

    def with_range(self, first: int, last: int) -> "StepRanges":
        """The same with a further range."""
        return StepRanges.of([*self.ranges, (first, last)])


def _parsed(entry: Any) -> tuple[int, int]:
    if type(entry) not in (int, str):
        raise ValueError(_WRITTEN)
    match = _RANGE.fullmatch(str(entry).strip())
    if match is None:
        raise ValueError(_WRITTEN)
    first, last = (int(match[3]),) * 2 if match[3] else (int(match[1]), int(match[2]))
    if last < first:
        raise ValueError(f"{_WRITTEN}, and {first}-{last} ends before it begins; use {last}-{first}")
    if not 1 <= first <= last <= MOST_STEPS:
        raise ValueError(_WRITTEN)
    return first, last
