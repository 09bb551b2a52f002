"""Decides from the heartbeats of all ranks, read again and again, which one does not answer.

A rank hangs when it has made no progress for `timeout` seconds while another one has waited as long in a collective. A
rank that waits itself does not hang, unless its process does not run. Everything that a rank begins or ends is
progress; so a long start, a compilation or a save that all ranks take part in is none, as nobody waits. Nor does a rank
hang at once that computes all the while, such as one that compiles a stage of its own: it has `PATIENCE` times as long.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from threefold.comm.heartbeat import RankState, RunSection, Wait
from threefold.launch.hangs.process_state import ProcessState

_MOST_NAMED = 4
"""Ranks that a message names one by one."""
PATIENCE: Final = 4
"""How many timeouts a rank may take until it meets the others (under a launcher it may still prepare its data), and for
one thing that it computes."""
COMPUTING_PART: Final = 0.5
"""Of the time since half of a timeout, from which on a process with that much work for a processor computes."""
SILENT_PART: Final = 2
"""A silence of `timeout` divided by this shows that a process does not run."""


@dataclass(frozen=True)
class Hang:
    """Ranks that do not answer, the first being the one to name.

    Attributes:
        ranks: those that hang; of ranks that all wait, all.
        error: what is wrong with the first, without its name.
    """

    ranks: tuple[int, ...]
    error: str


@dataclass
class _Known:
    """What has been seen of a rank.

    Attributes:
        place: as last read; None before the rank has one.
        idle: seconds without progress.
        silent: seconds without a beat.
        measured: of `idle` and of what its process had worked, when that was measured first and last.
    """

    place: RankState | None = None
    idle: float = 0.0
    silent: float = 0.0
    measured: tuple[tuple[float, float], tuple[float, float]] | None = None

    @property
    def wait(self) -> Wait | None:
        return self.place.wait if self.place else None

    @property
    def is_over(self) -> bool:
        return self.place is not None and self.place.section is RunSection.END

    def see(self, place: RankState | None, seconds: float) -> None:
        before, self.place = self.place or _UNKNOWN, place
        now = place or _UNKNOWN
        if now.progress == before.progress:
            self.idle += seconds
        else:
            self.idle, self.measured = 0.0, None
        self.silent = self.silent + seconds if now.beats == before.beats else 0.0

    def measure(self, worked: float) -> None:
        """Take note of the seconds that its process has worked so far."""
        now = (self.idle, worked)
        self.measured = (now if self.measured is None else self.measured[0], now)

    @property
    def computes(self) -> bool:
        """Whether it has mostly computed since it was measured first. (A rank that waits is not asked: another thread
        of its process may compute.)"""
        if self.measured is None or self.wait is not None:
            return False
        (begun, before), (now, after) = self.measured
        return now > begun and after - before >= COMPUTING_PART * (now - begun)


_UNKNOWN: Final = RankState(beats=-1, progress=-1)


class HangWatch:
    """Knows since when each rank has made no progress.

    Args:
        ranks: of the run.
        timeout: in seconds.
        state: of a rank's process, where it can be asked.
        worked: seconds for which a rank's process has had work for a processor.
        delayed: whether a rank sends where it is from time to time, so that a stopped one may have gone on since.
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
        """Take note of where the ranks are.

        Args:
            places: by rank; None where it is not known yet.
            seconds: since the last call, without those in which this process did not run itself.
            ended: ranks whose process has ended.
        """
        known = self._known
        for rank, place in enumerate(places):
            known[rank].see(place, seconds)
        live = [rank for rank in range(len(known)) if rank not in ended and not known[rank].is_over]
        slow = [rank for rank in live if known[rank].idle >= self.timeout / 2]
        if not slow:
            return None
        for rank in slow:
            if place := known[rank].place:
                known[rank].measure(self._worked(rank, place))
        states = {rank: self._state(rank) for rank in live}
        if ProcessState.TRACED in states.values():  # somebody looks at it in a debugger
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
        if stopped and stopped != live and hung == live:  # in a wait that no heartbeat knows of
            return self._named(stopped, [rank for rank in hung if rank not in stopped], states)
        return None

    def _limit(self, rank: int, states: dict[int, ProcessState]) -> float:
        each = self._known[rank]
        patient = each.place is None or (each.computes and states[rank] is ProcessState.RUNNING)
        return PATIENCE * self.timeout if patient else self.timeout

    def _runs(self, rank: int, states: dict[int, ProcessState]) -> bool:
        each = self._known[rank]
        # One that computes in native code may keep the thread that beats from running.
        return states[rank] is ProcessState.RUNNING and (each.silent < self.timeout / SILENT_PART or each.computes)

    def _named(self, hung: list[int], waiting: list[int], states: dict[int, ProcessState]) -> Hang:
        def order(rank: int) -> tuple[bool, bool, float]:
            each = self._known[rank]
            return states[rank] is ProcessState.RUNNING, self._runs(rank, states), -each.idle

        first, *others = sorted(hung, key=order)
        place, wait = self._known[first].place, self._known[first].wait
        seen = "last heard of " if self._delayed else ""
        if place is None:
            what = "it has not met the other ranks"
        elif states[first] is ProcessState.STOPPED:
            what = f"its process is stopped, as by SIGSTOP, {seen}{place}"
        elif not self._runs(first, states):
            what = f"its process does not run, {seen}{place}"
        else:
            what = f"it is {place}" + (", where it computes" if self._known[first].computes else "")
        what += f" ({wait})" if wait else ""
        also = f", as {_ranks(others)} {'do' if len(others) > 1 else 'does'} not either" if others else ""
        error = f"it has not answered for {self._limit(first, states):g} s (train.timeout){also}: {what}, and "
        return Hang((first, *others), error + self._who_waits(first, waiting))

    def _who_waits(self, rank: int, waiting: list[int]) -> str:
        """Who waits for a rank, and for what; others than for it itself where nobody does directly."""
        waits = {each: wait for each in waiting if (wait := self._known[each].wait)}
        if not waits:
            return f"{_ranks(waiting)} {'makes' if len(waiting) == 1 else 'make'} no progress either"
        direct = {each: wait for each, wait in waits.items() if wait.ranks is None or rank in wait.ranks}
        by_wait: dict[str, list[int]] = {}
        for each, wait in (direct or waits).items():
            by_wait.setdefault(str(wait), []).append(each)
        (what, ranks), *more = by_wait.items()
        verb = "waits" if len(ranks) == 1 else "wait"
        others = sum(map(len, by_wait.values())) - len(ranks)
        rest = f", {others} more in other collectives" if more else ""
        return f"{_ranks(ranks)} {verb} {'for it ' if direct else ''}in {what}{rest}"

    def _deadlock(self, waiting: list[int]) -> Hang:
        by_wait: dict[str, list[int]] = {}
        for rank in waiting:
            by_wait.setdefault(f"{self._known[rank].wait} {self._known[rank].place}", []).append(rank)
        (own, ranks), *others = by_wait.items()
        rest = "".join(f", {_ranks(others)} in {what}" for what, others in others)
        together = f" with {_ranks(ranks[1:])}" if len(ranks) > 1 else ""
        error = (
            f"it has waited for {self.timeout:g} s (train.timeout){together} in {own}{rest}, so that all wait for all"
        )
        return Hang(tuple(waiting), error)


class LostStore:
    """Knows since when the store that the heartbeats go through has not answered this rank.

    Args:
        rank: this one.
        timeout: in seconds.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout, self._exchanges, self._silent = rank, timeout, 0, 0.0
        self._known = _Known()

    def observe(self, place: RankState, exchanges: int, seconds: float) -> str:
        """What is wrong with rank 0, on whose host the store is; empty unless this rank waits for others meanwhile.

        Args:
            place: of this rank.
            exchanges: with the store so far.
            seconds: as of `HangWatch.observe`.
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


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2 and 5` or `ranks 1, 2, 3, 4 and 60 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown, more = list(ranks[:_MOST_NAMED]), len(ranks) - _MOST_NAMED
    if more == 1:
        shown, more = list(ranks), 0
    *most, last = [*map(str, shown), *([f"{more} more"] if more > 0 else [])]
    return f"ranks {', '.join(most)} and {last}"
