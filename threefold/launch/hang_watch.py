"""Detect hangs: find the rank that does not answer, from the heartbeats of all ranks."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from threefold.comm.heartbeat import Heartbeat, RankState, RunSection, Wait
from threefold.launch.output import log_file
from threefold.launch.process import ProcessState
from threefold.output import replace_link

BEAT: Final = 0.5
"""Seconds between two beats, and between two exchanges with a launcher's store in a small world."""
LOOK: Final = 0.25
"""Seconds between two looks at the pages of ranks of this host."""
_COUNTED_LOOKS: Final = 4  # looks: if more time passed between two, this process was stopped, and perhaps the ranks too
_MOST_NAMED = 4  # most ranks that a message lists one by one
PATIENCE: Final = 4
"""Number of timeouts that a rank may take until it meets the others (under a launcher it may still prepare its data),
and for one computation."""
COMPUTING_PART: Final = 0.5
"""A process counts as computing if it worked for this fraction of the time since half of a timeout."""
SILENT_PART: Final = 2
"""A process without a beat for `timeout` divided by this does not run."""


class Stopwatch:
    """Measure the seconds between two looks that are `interval` seconds apart, without those of a stopped process."""

    def __init__(self, interval: float) -> None:
        self._longest, self._looked = _COUNTED_LOOKS * interval, time.monotonic()

    def passed(self) -> float:
        """Return the seconds since the last call."""
        before, self._looked = self._looked, time.monotonic()
        return min(self._looked - before, self._longest)


@dataclass(frozen=True)
class Hang:
    """Ranks that do not answer, the one to blame first.

    Attributes:
        ranks: hung ranks; in a deadlock, all that wait.
        error: description of what is wrong with the first one, without its name.
    """

    ranks: tuple[int, ...]
    error: str


@dataclass
class _Known:
    """Observations of one rank.

    Attributes:
        place: state as last read; None before there is one.
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

    def measure(self, worked: float) -> None:
        now = (self.idle, worked)
        self.measured = (now if self.measured is None else self.measured[0], now)

    @property
    def computes(self) -> bool:
        """True if the rank has mostly computed since its first measurement, and does not wait.

        (Another thread of a waiting rank may compute, so a wait counts as no computation.)
        """
        if self.measured is None or self.wait is not None:
            return False
        (begun, before), (now, after) = self.measured
        return now > begun and after - before >= COMPUTING_PART * (now - begun)


_UNKNOWN: Final = RankState(beats=-1, progress=-1)


class HangWatch:
    """Track how long each rank has made no progress, and find those that hang.

    Args:
        ranks: number of ranks.
        timeout: seconds without progress after which a rank counts as hung.
        state: returns the state of a rank's process, where it can be asked.
        worked: returns the `worked_seconds` of a rank's process.
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
        """Record the states of the ranks, and return a hang if there is one.

        Args:
            places: state by rank; None where unknown so far.
            seconds: time since the last call, without time in which this process itself did not run.
            ended: ranks whose processes have ended.
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
            if place := known[rank].place:
                known[rank].measure(self._worked(rank, place))
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
        also = f", as {named_ranks(others)} {'do' if len(others) > 1 else 'does'} not either" if others else ""
        error = f"it has not answered for {self._limit(first, states):g} s (train.timeout){also}: {what}, and "
        return Hang((first, *others), error + self._who_waits(first, waiting))

    def _who_waits(self, rank: int, waiting: list[int]) -> str:
        """Describe who waits for a rank, and in what; if nobody waits for it directly, describe the other waits."""
        waits = {each: wait for each in waiting if (wait := self._known[each].wait)}
        if not waits:
            return f"{named_ranks(waiting)} {'makes' if len(waiting) == 1 else 'make'} no progress either"
        direct = {each: wait for each, wait in waits.items() if wait.ranks is None or rank in wait.ranks}
        by_wait: dict[str, list[int]] = {}
        for each, wait in (direct or waits).items():
            by_wait.setdefault(str(wait), []).append(each)
        (what, ranks), *more = by_wait.items()
        verb = "waits" if len(ranks) == 1 else "wait"
        others = sum(map(len, by_wait.values())) - len(ranks)
        rest = f", {others} more in other collectives" if more else ""
        return f"{named_ranks(ranks)} {verb} {'for it ' if direct else ''}in {what}{rest}"

    def _deadlock(self, waiting: list[int]) -> Hang:
        by_wait: dict[str, list[int]] = {}
        for rank in waiting:
            by_wait.setdefault(f"{self._known[rank].wait} {self._known[rank].place}", []).append(rank)
        (own, ranks), *others = by_wait.items()
        rest = "".join(f", {named_ranks(others)} in {what}" for what, others in others)
        together = f" with {named_ranks(ranks[1:])}" if len(ranks) > 1 else ""
        error = (
            f"it has waited for {self.timeout:g} s (train.timeout){together} in {own}{rest}, so that all wait for all"
        )
        return Hang(tuple(waiting), error)


class LostStore:
    """Track how long the store that carries the heartbeats has not answered this rank, up to `timeout` seconds."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout, self._exchanges, self._silent = rank, timeout, 0, 0.0
        self._known = _Known()

    def observe(self, place: RankState, exchanges: int, seconds: float) -> str:
        """Return the error of rank 0, whose host has the store; empty unless this rank waits for others meanwhile.

        Args:
            place: state of this rank.
            exchanges: number of exchanges with the store so far.
            seconds: time since the last call, without time in which this process itself did not run.
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


def named_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 1`, `ranks 1, 2 and 5` or `ranks 1, 2, 3, 4 and 60 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown, more = list(ranks[:_MOST_NAMED]), len(ranks) - _MOST_NAMED
    if more == 1:
        shown, more = list(ranks), 0
    *most, last = [*map(str, shown), *([f"{more:,} more"] if more > 0 else [])]
    return f"ranks {', '.join(most)} and {last}"


@contextmanager
def beating(heartbeat: Heartbeat, on_request: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Beat within the block; call `on_request` once when a reader of the page asks for it."""
    over = threading.Event()

    def beat() -> None:
        while True:
            heartbeat.beat()
            if heartbeat.is_asked:
                on_request()
                heartbeat.answer()
            if over.wait(BEAT):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


_COLLECTIVES: Final = 2000  # number of newest collectives that NCCL's flight recorder keeps


def keep_records(run_dir: Path | None) -> None:
    """Make NCCL record its collectives; call before the process group is initialised.

    Only environment variables set this.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_COLLECTIVES))
    if run_dir is not None:  # NCCL itself writes there when its own timeout is over
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(_prefix(run_dir)))


def write_records(run_dir: Path | None, rank: int) -> None:
    """Write this rank's flight recorder to RUN/logs, if there are records and a run folder."""
    from threefold.torch_private.distributed import nccl_records

    records = nccl_records() if run_dir is not None else None
    if run_dir is None or records is None:
        return
    with suppress(OSError):
        replace_link(Path(f"{_prefix(run_dir)}{rank}")).write_bytes(records)


def _prefix(run_dir: Path) -> Path:
    return log_file(run_dir, 0).parent / "flight_recorder_"
