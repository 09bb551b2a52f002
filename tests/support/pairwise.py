"""Pairwise arrays: few rows in which every two values of every two axes occur together."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
_TRIES = 24


def pairwise(axes: Mapping[str, Sequence[Any]], is_valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Return rows, one value of each axis in each, that have each pair of values which some valid row has.

    Every call returns the same rows. A pair that no valid row was found for is left out.
    """
    made = random.Random(0)
    waiting = dict.fromkeys(
        ((one, first), (other, second))
        for one, other in combinations(axes, 2)
        for first in axes[one]
        for second in axes[other]
    )
    rows: list[Row] = []
    while waiting:
        wanted = dict(next(iter(waiting)))
        drawn = ({name: made.choice(values) for name, values in axes.items()} | wanted for _ in range(20 * _TRIES))
        valid = [row for row in drawn if is_valid(row)][:_TRIES]
        best = max(valid, key=lambda row: sum(pair in waiting for pair in combinations(row.items(), 2)), default=None)
        if best is None:
            waiting.pop(tuple(wanted.items()))
            continue
        rows.append(best)
        for pair in combinations(best.items(), 2):
            waiting.pop(pair, None)
    return rows


def every_value(rows: Sequence[Row]) -> list[int]:
    """Return the indices of a few rows in which each value of each axis occurs."""
    waiting, taken = {item for row in rows for item in row.items()}, []
    while waiting:
        best = max(range(len(rows)), key=lambda place: len(waiting & rows[place].items()))
        taken.append(best)
        waiting -= rows[best].items()
    return taken
