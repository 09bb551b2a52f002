"""Hangs: find the rank that does not answer, from the heartbeats of all ranks (`threefold.resilience.rank_watch`)."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from threefold.comm.heartbeat import RunSection
from threefold.launch.environment import PATIENCE, named_ranks
from threefold.resilience.heartbeat import Wait
from threefold.resilience.processes import ProcessState
from threefold.resilience.rank_state import RankState


class Stopwatch:
    """Measure the seconds between two looks `interval` seconds apart, excluding time while the process was stopped."""

    def __init__(self, interval: float) -> None:
        # If more time passed between two looks, this process was stopped, and perhaps the ranks too.
        self._longest, self._looked = 4 * interval, time.monotonic()

    def passed(self) -> float:
        """Return the seconds since the last call."""
        before, self._looked = self._looked, time.monotonic()
        return min(self._looked - before, self._longest)


class Hang(NamedTuple):
    """Ranks that do not answer (in a deadlock, all that wait), the one to blame first, and its problem."""

    ranks: tuple[int, ...]
    error: str


@dataclass
class _Known:
    """Observations of one rank.

    Attributes:
        place: state as last read; None before the first read.
        idle: seconds without progress.
        silent: seconds without a beat.
        measured: first and last measurement, each of `idle` and the process's `worked_seconds`.
    """

    place: RankState | None = None
    idle: float = 0.0
    silent: float = 0.0
    measured: tuple[tuple[float, float], tuple[float, float]] | None = None

    @property
    def wait(self) -> Wait | None:
        return self.place.wait if self.place else None

    def see(self, place: RankState | None, seconds: float) -> None:
        before, self.place = self.place or _UNKNOWN, place
        now = place or _UNKNOWN
        if now.progress == before.progress:
            self.idle += seconds
        else:
            self.idle, self.measured = 0.0, None
        self.silent = self.silent + seconds if now.beats == before.beats else 0.0

    @property
    def computes(self) -> bool:
        """True if the rank has worked for half of the time since its first measurement, and does not wait.

        (Another thread of a waiting rank may compute, so a wait counts as no computation.)
        """
        if self.measured is None or self.wait is not None:
            return False
        (begun, before), (now, after) = self.measured
        return now > begun and after - before >= (now - begun) / 2


_UNKNOWN: Final = RankState(beats=-1, progress=-1)


class HangWatch:
    """Track how long each rank has made no progress, and find those that hang.

    Args:
        timeout: seconds without progress after which a rank counts as hung.
        delayed: whether states arrive with a delay, so that a stopped rank may have continued since.
    """

    def __init__(
        self,
        ranks: int,
        timeout: float,
        state: Callable[[int], ProcessState] = lambda rank: ProcessState.RUNNING,
        worked: Callable[[int, RankState], float] = lambda rank, place: place.worked,
        delayed: bool = False,
    ) -> None:
        self.timeout, self._state, self._worked, self._delayed = timeout, state, worked, delayed
        self._known = [_Known() for _ in range(ranks)]

    def observe(self, places: Sequence[RankState | None], seconds: float, ended: Collection[int] = ()) -> Hang | None:
        """Record the states of the ranks (None where unknown so far), and return a hang if there is one.

        `seconds` have passed since the last call, not counting time in which this process itself did not run; the
        processes of the `ended` ranks have ended.
        """
        known = self._known
        for rank, place in enumerate(places):
            known[rank].see(place, seconds)
        over = {rank for rank, place in enumerate(places) if place is not None and place.section is RunSection.END}
        live = [rank for rank in range(len(known)) if rank not in ended and rank not in over]
        slow = [rank for rank in live if known[rank].idle >= self.timeout / 2]
        if not slow:
            return None
        for rank in slow:
            each = known[rank]
            if each.place:
                now = (each.idle, self._worked(rank, each.place))
                each.measured = (now if each.measured is None else each.measured[0], now)
        states = {rank: self._state(rank) for rank in live}
        if ProcessState.TRACED in states.values():  # a debugger traces it
            self._known = [_Known(each.place) for each in known]
            return None
        late = [rank for rank in live if known[rank].idle >= self._limit(rank, states)]
        waiting = [rank for rank in late if known[rank].wait and self._runs(rank, states)]
        hung = [rank for rank in late if rank not in waiting]
        if waiting and hung:
            return self._named(hung, waiting, states)
        if waiting and waiting == live:
            return self._deadlock(waiting)
        stopped = [rank for rank in hung if not self._runs(rank, states)]
        if stopped and stopped != live and hung == live:  # they wait where no heartbeat knows of it
            return self._named(stopped, [rank for rank in hung if rank not in stopped], states)
        return None

    def _limit(self, rank: int, states: dict[int, ProcessState]) -> float:
        each = self._known[rank]
        patient = each.place is None or (each.computes and states[rank] is ProcessState.RUNNING)
        return PATIENCE * self.timeout if patient else self.timeout

    def _runs(self, rank: int, states: dict[int, ProcessState]) -> bool:
        each = self._known[rank]
        # Native code that computes may keep the thread that beats from running.
        return states[rank] is ProcessState.RUNNING and (each.silent < self.timeout / 2 or each.computes)

    def _named(self, hung: list[int], waiting: list[int], states: dict[int, ProcessState]) -> Hang:
        def order(rank: int) -> tuple[bool, bool, float]:
            return states[rank] is ProcessState.RUNNING, self._runs(rank, states), -self._known[rank].idle

        first, *others = sorted(hung, key=order)
        known = self._known[first]
        seen = "last heard of " if self._delayed else ""
        if known.place is None:
            what = "it has not met the other ranks"
        elif states[first] is ProcessState.STOPPED:
            what = f"its process is stopped, as by SIGSTOP, {seen}{known.place}"
        elif not self._runs(first, states):
            what = f"its process does not run, {seen}{known.place}"
        else:
            what = f"it is {known.place}" + (", where it computes" if known.computes else "")
        what += f" ({known.wait})" if known.wait else ""
        also = f", as {named_ranks(others)} {'do' if len(others) > 1 else 'does'} not either" if others else ""
        error = f"it has not answered for {self._limit(first, states):g} s (train.timeout){also}: {what}, and "
        # Who waits for the rank, and in what; if nobody waits for it directly, the other waits.
        waits = {each: wait for each in waiting if (wait := self._known[each].wait)}
        direct = {each: wait for each, wait in waits.items() if wait.ranks is None or first in wait.ranks}
        by_wait: dict[str, list[int]] = {}
        for each, wait in (direct or waits).items():
            by_wait.setdefault(str(wait), []).append(each)
        if by_wait:
            (called, ranks), *_ = by_wait.items()
            more = len(direct or waits) - len(ranks)
            error += f"{named_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {'for it ' if direct else ''}in "
            error += called + (f", {more} more in other collectives" if more else "")
        else:
            error += f"{named_ranks(waiting)} {'makes' if len(waiting) == 1 else 'make'} no progress either"
        return Hang((first, *others), error)

    def _deadlock(self, waiting: list[int]) -> Hang:
        by_wait: dict[str, list[int]] = {}
        for rank in waiting:
            by_wait.setdefault(f"{self._known[rank].wait} {self._known[rank].place}", []).append(rank)
        (first, ranks), *others = by_wait.items()
        rest = "".join(f", {named_ranks(others)} in {what}" for what, others in others)
        together = f" with {named_ranks(ranks[1:])}" if len(ranks) > 1 else ""
        begin = f"it has waited for {self.timeout:g} s (train.timeout){together}"
        return Hang(tuple(waiting), f"{begin} in {first}{rest}, so that all wait for all")


class LostStore:
    """Track how long the store that carries the heartbeats has not answered this rank, up to `timeout` seconds."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout, self._exchanges, self._silent = rank, timeout, 0, 0.0
        self._known = _Known()

    def observe(self, place: RankState, exchanges: int, seconds: float) -> str:
        """Return the error of rank 0, whose host has the store; empty unless this rank waits for others meanwhile.

        There were `exchanges` with the store so far, and `seconds` passed since the last call, as for `HangWatch`.
        """
        self._known.see(place, seconds)
        self._silent = self._silent + seconds if exchanges == self._exchanges else 0.0
        self._exchanges = exchanges
        if not place.wait or min(self._silent, self._known.idle) < self._timeout:
            return ""
        return (
            f"its host has not answered for {self._timeout:g} s (train.timeout): the launcher's store there is out of "
            f"reach, and rank {self._rank} waits in {place.wait} {place}"
        )
