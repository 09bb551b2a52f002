"""What the best layout is: one row for each value of `--objective`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from threefold.config.divisors import divisors
from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import one_of


@dataclass(frozen=True)
class Objective:
    """How layouts are ranked.

    Attributes:
        name: as given.
        title: what the best one has.
        counts: GPUs there are → the numbers of them that a layout may use.
        weight: GPUs used → what the seconds of a step are multiplied by; the layout with the least comes first.
    """

    name: str
    title: str
    counts: Callable[[int], list[int]]
    weight: Callable[[int], float]


_ROWS: Final = (
    # The batch is given, so that the shortest step has the most tokens per second.
    Objective("throughput", "most tokens per second on all GPUs", lambda gpus: [gpus], lambda used: 1.0),
    Objective("cost", "fewest GPU-hours per token, on as many GPUs or a part of them", divisors, float),
    Objective("latency", "shortest step, on as many GPUs or a part of them", divisors, lambda used: 1.0),
)
OBJECTIVES: Final = {row.name: row for row in _ROWS}
"""Name → objective. The first is the default."""


def find_objective(name: str) -> Objective:
    """The objective of a name.

    Raises:
        UserError: there is no such objective.
    """
    if name not in OBJECTIVES:
        raise UserError(f"--objective is {shown(name)} but must be {one_of(name, list(OBJECTIVES))}.")
    return OBJECTIVES[name]
