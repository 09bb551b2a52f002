"""Stragglers: ranks that take longer than the others for the same work and keep them waiting."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final, NamedTuple, cast

from threefold.comm.mesh import Mesh
from threefold.resilience.heartbeat import PageHeartbeat
from threefold.resilience.rank_state import read
from threefold.train.callbacks.base import Callback, RunContext, on_terminal, say
from threefold.train.callbacks.records import StepRecord

FACTOR: Final = 1.3
"""Multiple of the median at which a rank counts as slow: NVIDIA's Resiliency Extension reports one at 1 / 0.75."""


@dataclass(frozen=True)
class Straggler:
    """Rank that is slower than the median of the ranks with the same work.

    `factor` is its busy time as a multiple of the median, `waited` the fraction of the time that it waited,
    `others_waited` that of the median rank, and `alike` whether the compared ranks have the same work.
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
    """Return the ranks that were busy `FACTOR` times as long as the median of their group, slowest first.

    Only ranks that lost at least half as much time as the worst one are returned.

    Args:
        waited: seconds that each rank waited, by rank, of the `seconds` that passed.
        groups: ranks with the same work, such as the ranks of a pipeline stage; if every group has one rank, all ranks
            are compared.
        least: minimum number of seconds by which a slow rank exceeds the median.
        aside: seconds that each rank spent on work that is not compared, by rank; empty for none.
    """
    if seconds <= 0:
        return []
    busy = [max(seconds - each, 0.0) for each in map(sum, zip(waited, aside or [0.0] * len(waited), strict=True))]
    alike = [group for group in groups if len(group) > 1]
    found: list[tuple[float, Straggler]] = []
    for group in alike or [range(len(busy))]:
        # The lower median, so that of two ranks the faster is the measure.
        median = median_low(busy[rank] for rank in group)
        usual = next((waited[rank] / seconds for rank in group if busy[rank] == median), 0.0)
        for rank in group:
            if median > 0 and busy[rank] >= max(FACTOR * median, median + least):
                straggler = Straggler(rank, busy[rank] / median, waited[rank] / seconds, usual, bool(alike))
                found.append((busy[rank] - median, straggler))
    # A step lasts as long as its slowest rank, which may also slow others, for example on shared cores.
    largest = max((lost for lost, _ in found), default=0.0)
    return sorted((each for lost, each in found if lost >= largest / 2), key=lambda each: -each.factor)


_LEAST_SECONDS: Final = 0.02
"""Minimum cost of a slow rank in seconds per step: the first rank's callbacks and a busy host's noise cost less."""
_LEAST_LOOK: Final = 5.0  # minimum seconds between two reported looks, as other load on a host may slow a rank for less
_OFTEN, _LEAST_LOOKS = 0.75, 4
"""Share and minimum number of looks in which a rank must be slow to count as slow over the whole run."""
_MOST_NAMED: Final = 4


class _Look(NamedTuple):
    """Times after a step: for each rank, the seconds that it had waited so far, and its `RankState.aside`."""

    step: int
    when: float
    spent: list[tuple[float, float]]


class StragglerReport(Callback):
    """Report ranks that were slow in two looks in a row, and at the end those that were slow over the whole run.

    Saving, and callbacks that only one rank has, do not count, as other ranks have less of that work. On a GPU a rank
    waits for its own work and for other ranks in the same call, so there is no report.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> "StragglerReport | None":
        is_comparable = run.mesh.world.size > 1 and run.mesh.device.type == "cpu"
        return cls(run.mesh, run.config.log.every) if is_comparable else None

    def __init__(self, mesh: Mesh, every: int) -> None:
        self._heartbeat, self._every = cast(PageHeartbeat, mesh.heartbeat), every
        self._groups = mesh.layout.groups("dp", "cp", "tp")  # ranks with the same work
        self._first: _Look | None = None
        self._before: _Look | None = None
        self._last: _Look | None = None
        self._looks, self._often = 0, Counter[int]()
        self._slow, self._named = set[int](), set[int]()

    def after_step(self, record: StepRecord) -> None:
        if self._first is None:  # the first step is not representative
            self._first = self._before = self._last = self._look()
            if self._first is not None:
                self.step_interval = self._every
        elif (now := self._look()) is not None:
            self._looks += 1
            self._often.update(each.rank for each in self._between(self._before, now))
            self._before = now
            if self._last is not None and now.when - self._last.when < _LEAST_LOOK:
                return
            found, self._last = self._between(self._last, now), now
            slow = {each.rank for each in found}
            if again := [each for each in found if each.rank in self._slow - self._named]:
                if not on_terminal():  # a live line occupies a terminal until the end
                    say(f"step {record.step:,}  slow: {_listed(again)}")
                self._named |= {each.rank for each in again}
            self._slow, self._named = slow, self._named & slow

    def after_fit(self) -> None:
        most = max(_OFTEN * self._looks, _OFTEN * _LEAST_LOOKS)
        if found := [each for each in self._between(self._first, self._look()) if self._often[each.rank] >= most]:
            say(f"Slow over the whole run: {_listed(found)}.")

    def _look(self) -> _Look | None:
        places = self._heartbeat.everyone()
        known = [(place.waited, place.aside) for place in places if place is not None]
        step = read(self._heartbeat.content()).step
        return _Look(step, time.monotonic(), known) if len(places) == len(known) > 1 else None

    def _between(self, before: _Look | None, after: _Look | None) -> list[Straggler]:
        if before is None or after is None or after.step == before.step:
            return []
        spent = zip(before.spent, after.spent, strict=True)
        waited, aside = zip(*((last[0] - first[0], last[1] - first[1]) for first, last in spent), strict=True)
        least = _LEAST_SECONDS * (after.step - before.step)
        return find_stragglers(waited, after.when - before.when, self._groups, least, aside)


def _listed(found: Sequence[Straggler]) -> str:
    more = len(found) - _MOST_NAMED
    return "; ".join(map(str, found[:_MOST_NAMED])) + (f"; and {more} more" if more > 0 else "")
