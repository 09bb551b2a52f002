"""Which ranks are slower than the others, from how long each has waited in collectives.

Between two looks all ranks pass the same time. What a rank has not waited of it, it was busy, and a slow rank is busy
longest: it comes last into each collective, and the others wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

FACTOR: Final = 1.3
"""Times the median from which on a rank is slow: that at which NVIDIA's Resiliency Extension reports one, 1 / 0.75."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the median of those with the same work.

    Attributes:
        rank: its number.
        factor: how many times as long as the median it was busy.
        waited: part of the time in which it waited.
        others_waited: that of the rank of the median.
        alike: whether the ranks of the median have the same work.
    """

    rank: int
    factor: float
    waited: float
    others_waited: float
    alike: bool = True

    def __str__(self) -> str:
        others = "the ranks with the same work" if self.alike else "all ranks, whose stages may differ"
        return (
            f"rank {self.rank} computes {self.factor:.1f} times as long as the median of {others}, and waits "
            f"{self.waited:.0%} of the time, the median one {self.others_waited:.0%}"
        )


def find_stragglers(
    waited: Sequence[float],
    seconds: float,
    groups: Sequence[Sequence[int]],
    least: float = 0.0,
    aside: Sequence[float] = (),
) -> list[Straggler]:
    """The ranks that were busy `FACTOR` times as long as the median of their group, the slowest first; of several those
    that lost at least half as much time as the one that lost most.

    Args:
        waited: seconds that each rank waited, by rank.
        seconds: that passed.
        groups: ranks with the same work, such as those of a pipeline stage; where each rank is alone in its own, all
            ranks are compared.
        least: seconds that a slow rank is busy longer than the median at least.
        aside: seconds that each rank spent on what is not compared, by rank; none where it is empty.
    """
    if seconds <= 0:
        return []
    busy = [max(seconds - each, 0.0) for each in map(sum, zip(waited, aside or [0.0] * len(waited), strict=True))]
    alike = [group for group in groups if len(group) > 1]
    compared = alike or [range(len(busy))]
    found, largest = [], 0.0
    for group in compared:
        # Of an even number the lower one, so that of two ranks the faster one is the measure.
        median = median_low(busy[rank] for rank in group)
        slow = [rank for rank in group if median > 0 and busy[rank] >= max(FACTOR * median, median + least)]
        usual = next((waited[rank] / seconds for rank in group if busy[rank] == median), 0.0)
        for rank in slow:
            straggler = Straggler(rank, busy[rank] / median, waited[rank] / seconds, usual, bool(alike))
            found.append((busy[rank] - median, straggler))
        largest = max([largest, *(busy[rank] - median for rank in slow)])
    # A step lasts as long as the slowest takes: what is lost to others may be its doing, as on cores that they share.
    return sorted((each for lost, each in found if lost >= largest / 2), key=lambda each: -each.factor)
