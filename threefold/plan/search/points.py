"""Layouts of a search for a picture: some at random, and those that no other beats in both memory and time."""

from typing import Final, NamedTuple

import numpy as np

from threefold.plan.search.costs import Array, Costs, Evaluated
from threefold.plan.search.search import Found

_POINTS: Final = 4000
_STEP: Final = 0.9
"""The next layout of the front has at most this share of the memory of the one before."""
_EVALUATED: Final = 120
"""Layouts that are evaluated for the front, at most."""


class Points(NamedTuple):
    """Layouts that fit.

    Attributes:
        seconds: of a step.
        peak: bytes of the rank with the most, at least.
        front: the fastest layouts for their memory, exactly, the one with the least memory first.
    """

    seconds: Array
    peak: Array
    front: list[Evaluated]


def points_of(found: Found, costs: Costs, step: float = _STEP, most: int = _EVALUATED) -> Points:
    """The points of a search. None of them is a layout that is known not to fit.

    Args:
        found: by the search; some layouts fit.
        costs: the cost model.
        step: the next layout of the front has at most this share of the memory of the one before.
        most: layouts that are evaluated for the front.
    """
    seconds = np.concatenate([each.seconds for each in found.meshes])
    peak = np.concatenate([each.peak for each in found.meshes])
    starts = np.cumsum([0, *(len(each.seconds) for each in found.meshes)])
    fits = np.ones(len(seconds), dtype=bool)
    fits[found.unfit] = False
    front = [min(found.ranked, key=lambda each: (each.seconds, each.peak))]
    evaluated: dict[int, Evaluated] = {}
    while len(evaluated) < most:
        limit = front[-1].peak * step
        left = np.where(fits & (peak <= limit), seconds, np.inf)
        fastest: Evaluated | None = None
        while len(evaluated) < most:
            place = int(left.argmin())
            if left[place] >= (np.inf if fastest is None else fastest.seconds):
                break
            left[place] = np.inf
            if place not in evaluated:
                owner = int(np.searchsorted(starts, place, side="right")) - 1
                evaluated[place] = costs.evaluate(found.meshes[owner].choice(place - int(starts[owner])))
            layout = evaluated[place]
            peak[place] = layout.peak
            if layout.peak <= limit and (fastest is None or layout.seconds < fastest.seconds):
                fastest = layout
        if fastest is None:
            break
        front.append(fastest)
    shown = np.flatnonzero(fits)
    some = np.random.default_rng(0).choice(shown, min(_POINTS, len(shown)), replace=False)
    return Points(seconds[some], peak[some], front[::-1])
