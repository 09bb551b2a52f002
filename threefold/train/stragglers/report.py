"""A callback that names slow ranks, from the heartbeats of all; it adds no collective."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from threefold.comm.heartbeat import RankState
from threefold.train.callbacks.base import Callback, RunContext, StepRecord
from threefold.train.callbacks.console import on_terminal, say
from threefold.train.stragglers.busy_times import Straggler, find_stragglers

_LEAST_SECONDS: Final = 0.02
"""Of a step that a slow rank costs: the callbacks of the first rank and the noise of a busy host cost less."""
_LEAST_LOOK: Final = 5.0
"""Seconds between two looks that a line is about: what else a host does may slow a rank for shorter."""
_OFTEN, _LEAST_LOOKS = 0.75, 4
"""Part of the looks, and how many, in which a rank that is slow over the whole run has to be slow."""
_MOST_NAMED: Final = 4


class StragglerReport(Callback):
    """Says which ranks are slow, once they were so between two looks twice in a row, and at the end which were so over
    the whole run.

    Saving, and callbacks that one rank alone has, do not count: other ranks have less of that work.

    On a GPU a rank waits in the same call for its own work and for the other ranks, so that there is no report.

    Args:
        every: steps between two looks.
        places: reads where each rank is; None for one of which that is not known.
        groups: ranks with the same work.
        emit: gets the lines before the end.
        say: gets the line at the end.
    """

    @classmethod
    def for_run(cls, run: RunContext) -> "StragglerReport | None":
        mesh = run.mesh
        if mesh.world.size == 1 or mesh.device.type != "cpu":
            return None
        emit = (lambda _: None) if on_terminal() else say  # a live line is drawn there until the end
        groups = mesh.layout.groups("dp", "cp", "tp")
        return cls(run.config.log.every, mesh.heartbeat.everyone, groups, emit, say)

    def __init__(
        self,
        every: int,
        places: Callable[[], Sequence[RankState | None]],
        groups: Sequence[Sequence[int]],
        emit: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._every, self._places, self._groups, self._emit, self._say = every, places, groups, emit, say
        self._first: _Look | None = None
        self._before: _Look | None = None
        self._last: _Look | None = None
        self._looks = 0
        self._often: Counter[int] = Counter()
        self._slow: set[int] = set()
        self._named: set[int] = set()
        self._step = 0

    def after_step(self, record: StepRecord) -> None:
        self._step = record.step
        if self._first is None:  # from the end of the first step on, which is not like the others
            self._first = self._before = self._last = self._look()
        elif record.step % self._every == 0 and (now := self._look()) is not None:
            self._looks += 1
            self._often.update(each.rank for each in self._between(self._before, now))
            self._before = now
            if self._last is not None and now.when - self._last.when < _LEAST_LOOK:
                return
            found, self._last = self._between(self._last, now), now
            slow = {each.rank for each in found}
            if again := [each for each in found if each.rank in self._slow - self._named]:
                self._emit(f"global step {record.step}, slow: {_listed(again)}")
                self._named |= {each.rank for each in again}
            self._slow, self._named = slow, self._named & slow

    def after_fit(self) -> None:
        most = max(_OFTEN * self._looks, _OFTEN * _LEAST_LOOKS)
        if found := [each for each in self._between(self._first, self._look()) if self._often[each.rank] >= most]:
            self._say(f"Slow over the whole run: {_listed(found)}.")

    def _look(self) -> "_Look | None":
        places = self._places()
        known = [(place.waited, place.aside) for place in places if place is not None]
        return _Look(self._step, time.monotonic(), known) if len(places) == len(known) > 1 else None

    def _between(self, before: "_Look | None", after: "_Look | None") -> list[Straggler]:
        if before is None or after is None or after.step == before.step:
            return []
        spent = zip(before.spent, after.spent, strict=True)
        waited, aside = zip(*((last[0] - first[0], last[1] - first[1]) for first, last in spent), strict=True)
        least = _LEAST_SECONDS * (after.step - before.step)
        return find_stragglers(waited, after.when - before.when, self._groups, least, aside)


class _Look(NamedTuple):
    """What was known after a step.

    Attributes:
        step: its number.
        when: `time.monotonic`.
        spent: seconds that each rank had waited so far, and those of `RankState.aside`.
    """

    step: int
    when: float
    spent: list[tuple[float, float]]


def _listed(found: Sequence[Straggler]) -> str:
    return "; ".join(map(str, found[:_MOST_NAMED])) + (
        f"; and {len(found) - _MOST_NAMED} more" * (len(found) > _MOST_NAMED)
    )
