"""Settings of responses to faults: steps to skip, fault policies and addresses, and the rules about them."""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from threefold.config import Config
from threefold.config.rules import Broken
from threefold.config.schema import ON_NAN, ON_SPIKE
from threefold.config.section import MOST_STEPS
from threefold.errors import UserError
from threefold.files import shown

_RANGE = re.compile(r"(\d{1,15}) ?- ?(\d{1,15})|(\d{1,15})")
_WRITTEN = "a list of steps and ranges of steps from 1 on, such as [120, 300-320]"


@dataclass(frozen=True)
class StepRanges:
    """Set of steps, counted from 1; `ranges` are (first, last), ascending, disjoint and not adjacent."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "StepRanges":
        """Return the union of ranges given in any order, overlapping or not."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, given: Any) -> "StepRanges":
        """Parse a whole number, a range as text, or a list of these; raise ValueError with the accepted forms."""
        entries = given if isinstance(given, list | tuple) else [given]
        return cls.of(_parsed(entry) for entry in entries)

    @property
    def written(self) -> tuple[int | str, ...]:
        """Steps and ranges as they are written in a config, such as `(120, "300-320")`."""
        return tuple(first if first == last else f"{first}-{last}" for first, last in self.ranges)

    def __contains__(self, step: int) -> bool:
        return self.around(step) is not None

    def __str__(self) -> str:
        return ", ".join(str(entry) for entry in self.written)

    def around(self, step: int) -> tuple[int, int] | None:
        """Return the range that contains a step, or None."""
        place = bisect_right(self.ranges, (step, MOST_STEPS + 1)) - 1
        return self.ranges[place] if place >= 0 and step <= self.ranges[place][1] else None

    def next_outside(self, step: int) -> int:
        """Return the first step from `step` on that is in no range."""
        found = self.around(step)
        return step if found is None else found[1] + 1

    def with_range(self, first: int, last: int) -> "StepRanges":
        return StepRanges.of([*self.ranges, (first, last)])


def require_address(text: str) -> str:
    """Return the address of `checkpoint.remote`; raise ValueError with its form for what `fsspec` takes for a path."""
    if re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\0]+", text) is None:
        raise ValueError("an address with its protocol, such as s3://bucket/run or file:///mnt/run")
    return text


def skipped_steps_rules(config: Config) -> Broken:
    """Yield `data.skip_steps` if it leaves no step."""
    if StepRanges.parse(config.data.skip_steps or ()).next_outside(1) > config.train.max_steps:
        rule = f"leaves none of the {config.train.max_steps} steps of train.max_steps; leave one of them out of it"
        yield "data.skip_steps", rule


def check_fault_policies(config: Config) -> None:
    """Check before any process starts that policies of other packages are functions; raise a `UserError` if not."""
    for registry, name in ((ON_NAN, config.train.on_nan), (ON_SPIKE, config.train.on_spike)):
        if name not in registry.built_in and not callable(found := registry.load(name)):
            raise UserError(
                f"{registry.setting} is {shown(name)}, which is declared as {found!r} but must be a function that gets "
                "a Fault and returns stop, skip or rollback."
            )


def _parsed(entry: Any) -> tuple[int, int]:
    match = _RANGE.fullmatch(str(entry).strip()) if type(entry) in (int, str) else None
    if match is None:
        raise ValueError(_WRITTEN)
    first, last = (int(match[3]),) * 2 if match[3] else (int(match[1]), int(match[2]))
    if last < first:
        raise ValueError(f"{_WRITTEN}, and {first}-{last} ends before it begins; use {last}-{first}")
    if not 1 <= first <= last <= MOST_STEPS:
        raise ValueError(_WRITTEN)
    return first, last
