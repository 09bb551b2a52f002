"""Curves of values over the steps of a run, thinned to a limited number of points with their extremes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Any, Final

_HEIGHTS: Final = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class _Bucket:
    """Sums of the values of consecutive steps: for each name the count, sum, minimum and maximum."""

    first: int
    last: int
    values: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)

    def add(self, name: str, count: float, total: float, low: float, high: float) -> None:
        if (held := self.values.get(name)) is not None:
            count, total, low, high = held[0] + count, held[1] + total, min(held[2], low), max(held[3], high)
        self.values[name] = (count, total, low, high)


class Curves:
    """Values by name over the steps of a run, in one pass and limited memory.

    A point is the mean of a value over `width` consecutive steps, with its minimum and maximum. The width is 1 until
    there are more than `most` points, and then doubles whenever there are again. So no extreme is ever lost.
    """

    def __init__(self, most: int = 2000) -> None:
        self.most, self.width = most, 1
        self._buckets: list[_Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def last_step(self) -> int:
        """Last step with values; 0 if there is none."""
        return self._buckets[-1].last if self._buckets else 0

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add the values of a step, which comes after all others; None and numbers that are not finite have no place.

        A step that is not after all others begins the curves anew there: its points and all later ones are dropped.
        """
        while self._buckets and self._buckets[-1].last >= step:
            self._buckets.pop()
        if not self._buckets or self._place(self._buckets[-1].first) != self._place(step):
            self._buckets.append(_Bucket(step, step))
        bucket = self._buckets[-1]
        bucket.last = step
        for name, value in values.items():
            if value is not None and isfinite(value):
                bucket.add(name, 1, value, value, value)
        while len(self._buckets) > self.most:
            self.width *= 2
            whole, self._buckets = self._buckets, []
            for bucket in whole:
                if not self._buckets or self._place(self._buckets[-1].first) != self._place(bucket.first):
                    self._buckets.append(bucket)
                    continue
                self._buckets[-1].last = bucket.last
                for name, sums in bucket.values.items():
                    self._buckets[-1].add(name, *sums)

    def total(self, name: str) -> float:
        return sum(bucket.values[name][1] for bucket in self._buckets if name in bucket.values)

    def count(self, name: str) -> int:
        """Return the number of steps that have a value."""
        return round(sum(bucket.values[name][0] for bucket in self._buckets if name in bucket.values))

    def names(self) -> list[str]:
        """Return the names of all values, in the order in which they appeared."""
        return list(dict.fromkeys(name for bucket in self._buckets for name in bucket.values))

    def means(self, name: str) -> list[float]:
        """Return the points of a value, without those that have none."""
        held = (bucket.values.get(name) for bucket in self._buckets)
        return [each[1] / each[0] for each in held if each is not None]

    def document(self, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the curves as a JSON object, with `null` where a point has no value.

        Its members are `width`; `first` and `last`, the steps of each point; and `values`, for each name lists `mean`,
        `low` and `high`, of which the last two are left out if they are all equal to the mean.
        """
        values = {}
        for name in [each for each in self.names() if each not in left_out]:
            held = [bucket.values.get(name) for bucket in self._buckets]
            found = {"mean": [None if each is None else _rounded(each[1] / each[0]) for each in held]}
            if any(each is not None and each[2] != each[3] for each in held):
                found["low"] = [None if each is None else _rounded(each[2]) for each in held]
                found["high"] = [None if each is None else _rounded(each[3]) for each in held]
            values[name] = found
        return {
            "width": self.width,
            "first": [bucket.first for bucket in self._buckets],
            "last": [bucket.last for bucket in self._buckets],
            "values": values,
        }

    def _place(self, step: int) -> int:
        return (step - 1) // self.width


def sparkline(values: list[float], cells: int = 40) -> str:
    """Draw values as a line of at most `cells` characters, each the mean of some of them; empty without values."""
    count = min(cells, len(values))
    bounds = [place * len(values) // count for place in range(count + 1)] if count else []
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = high - low or 1.0
    return "".join(_HEIGHTS[round((mean - low) / span * (len(_HEIGHTS) - 1))] for mean in means)


def _rounded(value: float) -> float:
    """Round to six significant digits, which keeps the document small."""
    return float(f"{value:.6g}")
