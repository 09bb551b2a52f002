"""Detect hangs: find the rank that does not answer, from the heartbeats of all ranks.

`HangWatch` decides. The ranks of one host have their heartbeats in shared memory, where `threefold.launch.local` reads
them; `StoreWatch` sends those of launched ranks over the launcher's store.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from threefold.comm.heartbeat import Heartbeat
from threefold.comm.rank_state import RankState, RunSection, Wait, read
from threefold.foreign import own_file, write_own
from threefold.launch.failure import Failure, is_first_to_report
from threefold.launch.output import log_file
from threefold.launch.process import ProcessState, identify_process, pid_if_here, process_state, worked_seconds

BEAT: Final = 0.5
"""Seconds between two beats, and between two exchanges with a launcher's store in a small world."""
LOOK: Final = 0.25
"""Seconds between two looks at the pages of ranks of this host."""
_MOST_NAMED = 4  # most ranks that a message lists one by one
PATIENCE: Final = 4
"""Number of timeouts that a rank may take to meet the others (under a launcher it may still prepare its data), and for
one computation."""


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
        (own, ranks), *others = by_wait.items()
        rest = "".join(f", {named_ranks(others)} in {what}" for what, others in others)
        together = f" with {named_ranks(ranks[1:])}" if len(ranks) > 1 else ""
        begin = f"it has waited for {self.timeout:g} s (train.timeout){together}"
        return Hang(tuple(waiting), f"{begin} in {own}{rest}, so that all wait for all")


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


def flight_recorder(run_dir: Path | None, rank: int) -> Callable[[], None]:
    """Make NCCL record its collectives, and return a function that writes the records of `rank` to RUN/logs, if any.

    Only environment variables set this; call before the process group is initialised.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the newest collectives that are kept
    if run_dir is None:
        return lambda: None
    prefix = log_file(run_dir, 0).parent / "flight_recorder_"
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))  # NCCL writes there when its own timeout is over

    with suppress(OSError):
        own_file(Path(f"{prefix}{rank}"))  # for NCCL

    def write() -> None:
        from threefold.torch_private.distributed import nccl_records

        if (records := nccl_records()) is not None:
            with suppress(OSError):
                write_own(Path(f"{prefix}{rank}"), records)

    return write


_NOTHING: Final = "-"  # value of a page that has not been written yet
_CLAIM, _VERDICT = "hang/claim", "hang/verdict"


class StoreWatch:
    """Find the rank that does not answer, from every rank over the launcher's store.

    Args:
        store: store of the rendezvous, used over separate connections.
        timeout: seconds without progress after which a rank counts as hung.
        tell: reports a failure to the user; called at most once, in a thread of the watch. The second argument says
            whether this rank is the only one to report, which is unknown where the store is out of reach.
        on_hang: called on every rank that still can, before its process ends.
    """

    def __init__(
        self,
        store: Any,  # torch's stub of a `Store` lacks `clone`
        rank: int,
        ranks: int,
        timeout: float,
        tell: Callable[[Failure, bool], None],
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        self._places: list[RankState | None] = [None] * ranks
        self.heartbeat = Heartbeat(everyone=self._places.copy)
        self._process = identify_process(os.getpid())
        self.heartbeat.identify(self._process)
        self._store, self._rank, self._ranks, self._timeout, self._tell = store, rank, ranks, timeout, tell
        self._on_hang = on_hang
        self._interval = max(BEAT, ranks / 2000)  # the store takes and gives so many pages a second
        self._watch = HangWatch(ranks, timeout, self._state, self._worked, delayed=True)
        self._lost = LostStore(rank, timeout)
        self._exchanges, self._judges = 0, False
        self._over = threading.Event()
        self._ending = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch within the block; send this rank's last heartbeat to the store after it."""
        threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._exchange)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(2.0)  # until the store knows that this rank has ended; it may be gone

    def _state(self, rank: int) -> ProcessState:
        place = self._places[rank]
        pid = pid_if_here(place.process) if place else None
        return ProcessState.RUNNING if pid is None else process_state(pid)

    def _worked(self, rank: int, place: RankState) -> float:
        pid = pid_if_here(place.process)
        return place.worked if pid is None else worked_seconds(pid) or place.worked

    def _beat(self) -> None:
        stopwatch, seen = Stopwatch(BEAT), -1
        while not self._over.wait(BEAT):
            place = self.heartbeat.place()
            self.heartbeat.beat(worked_seconds(os.getpid()) if place.progress == seen else place.worked)
            seen = place.progress
            if error := self._lost.observe(place, self._exchanges, stopwatch.passed()):
                self._tell(Failure(0, error, time.monotonic(), silent=True), False)
                self._end()

    def _exchange(self) -> None:
        """Exchange pages with the store, reconnecting when the connection is lost."""
        while not self._over.is_set():
            with suppress(Exception):  # a late answer, or the store ended with the process that holds it
                self._exchange_over_one()
                return
            self._over.wait(self._interval)

    def _exchange_over_one(self) -> None:
        """Send this rank's page and look for a verdict, repeatedly.

        A judge also reads all pages; if there is a hang that no other judge has claimed, it reports it, publishes the
        verdict and ends.
        """
        store = self._store.clone()
        store.set_timeout(timedelta(seconds=max(self._timeout, 1)))
        judges = self._rank in (0, self._ranks // 2, self._ranks - 1)
        keys = [f"hang/page/{rank}" for rank in range(self._ranks)]
        for key in keys if judges else ():
            store.compare_set(key, "", _NOTHING)
        stopwatch = Stopwatch(BEAT)
        while True:
            over = self._over.is_set()
            store.set(keys[self._rank], self.heartbeat.content())
            if over:
                return
            if store.check([_VERDICT]):
                self._end(json.loads(store.get(_VERDICT)))
            if judges:
                pages = store.multi_get(keys)
                self._places[:] = [None if page == _NOTHING.encode() else read(page) for page in pages]
                hang = self._watch.observe(self._places, stopwatch.passed())
                if hang and not self._judges:
                    self._judges = int(store.add(_CLAIM, 1)) == 1
                if hang and self._judges:  # otherwise the other judge's verdict follows
                    if is_first_to_report(store):  # otherwise another failure has been reported
                        self._tell(Failure(hang.ranks[0], hang.error, time.monotonic(), silent=True), True)
                    processes = [place.process for rank in hang.ranks if (place := self._places[rank])]
                    store.set(_VERDICT, json.dumps(processes))
                    time.sleep(2 * self._interval)  # this process may hold the store, where the verdict must be found
                    self._end(processes)
            self._exchanges += 1
            self._over.wait(self._interval)

    def _end(self, hung: Sequence[str] = ()) -> NoReturn:
        """End the hung processes that are on this host, then this one."""
        with self._ending:
            self._on_hang()
            for process in hung:
                if process != self._process and (pid := pid_if_here(process)) is not None:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            os._exit(1)
