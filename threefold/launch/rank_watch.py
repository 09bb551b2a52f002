"""Watch for ranks that do not answer: through shared memory on one host, or through a launcher's store."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from threefold.comm.heartbeat import PAGE_BYTES, Heartbeat, Page, RankState, ask, read
from threefold.launch.failure import REPORTS, Failure
from threefold.launch.hang_watch import (
    Hang,
    HangWatch,
    LostStore,
    ProcessState,
    identify_process,
    kill_if_here,
    process_state,
    state_if_here,
    worked_if_here,
    worked_seconds,
)

if TYPE_CHECKING:
    from torch.distributed import Store


INTERVAL: Final = 0.25
"""Seconds between two looks at the pages."""
_LONGEST_LOOK: Final = 4 * INTERVAL
"""Most seconds that count between two looks: if more passed, this process was stopped, and perhaps the ranks too."""
_ANSWERS_WITHIN: Final = 3.0  # seconds to wait for ranks that write their flight recorders


class SharedPages:
    """One heartbeat page per rank, in memory shared with the processes that this one starts."""

    def __init__(self, context: Any, ranks: int) -> None:
        self._ranks, self._memory = ranks, context.RawArray("b", ranks * PAGE_BYTES)

    def __len__(self) -> int:
        return self._ranks

    def page(self, rank: int) -> Page:
        return memoryview(self._memory).cast("B")[rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES]

    def places(self) -> list[RankState | None]:
        """Read the state of each rank; None where its page has none yet."""
        return [read(self.page(rank)) for rank in range(self._ranks)]

    def heartbeat(self, rank: int) -> Heartbeat:
        """Return a heartbeat that writes the page of `rank`."""
        return Heartbeat(self.page(rank), self.places)


class LocalWatch:
    """Find the rank of this host that does not answer, from its page and its process.

    Args:
        pages: pages of the ranks.
        pids: process ids of the ranks.
        timeout: seconds without progress after which a rank counts as hung.
        asks: whether to ask the other ranks for their flight recorders before they are ended.
    """

    def __init__(self, pages: SharedPages, pids: Sequence[int], timeout: float, asks: bool = False) -> None:
        self._pages, self._asks = pages, asks
        self._watch = HangWatch(
            len(pages),
            timeout,
            state=lambda rank: process_state(pids[rank]),
            # The page does not tell: native code may keep the thread that beats from running.
            worked=lambda rank, place: worked_seconds(pids[rank]),
        )
        self._looked = time.monotonic()

    def look(self, ended: Collection[int]) -> Failure | None:
        """Return the failure of the rank that does not answer; None if all do. `ended` ranks have no process."""
        now = time.monotonic()
        seconds, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        hang = self._watch.observe(self._pages.places(), seconds, ended)
        if hang is None:
            return None
        if self._asks:
            self._ask([rank for rank in range(len(self._pages)) if rank not in (*ended, *hang.ranks)])
        return Failure(hang.ranks[0], hang.error, time.monotonic(), silent=True)

    def _ask(self, ranks: Sequence[int]) -> None:
        pages = [self._pages.page(rank) for rank in ranks]
        for page in pages:
            ask(page)
        deadline = time.monotonic() + _ANSWERS_WITHIN
        while time.monotonic() < deadline and not all(read(page).answered for page in pages):
            time.sleep(INTERVAL)


_INTERVAL: Final = 0.5  # seconds between two exchanges with the store in a small world
_RANKS_PER_SECOND: Final = 2000  # pages per second that the store takes and gives
_LONGEST_STEP: Final = 2.0
"""Most seconds that count between two looks: if more passed, this process was stopped, and perhaps the others too."""
_LAST_EXCHANGE: Final = 2.0  # seconds to wait until the store knows that this rank has ended
_NOTHING: Final = "-"  # value of a page that has not been written yet
_CLAIM, _VERDICT = "hang/claim", "hang/verdict"
_EXIT_STATUS: Final = 1

Tell = Callable[[Failure, bool], None]
"""Report a failure to the user. The argument says whether this rank is the only one to report, which is unknown where
the store is out of reach."""


class StoreWatch:
    """Find the rank that does not answer, from every rank over the launcher's store.

    Args:
        store: store of the rendezvous, used over separate connections.
        rank: this rank.
        ranks: number of ranks.
        timeout: seconds without progress after which a rank counts as hung.
        tell: reports a failure; called at most once, in a thread of the watch.
        on_hang: called on every rank that still can, before its process ends.
    """

    def __init__(
        self,
        store: "Store",
        rank: int,
        ranks: int,
        timeout: float,
        tell: Tell,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        self.heartbeat = Heartbeat(everyone=self._everyone)
        self._process = identify_process(os.getpid())
        self.heartbeat.identify(self._process)
        self._store, self._rank, self._ranks, self._timeout, self._tell = store, rank, ranks, timeout, tell
        self._on_hang = on_hang
        self._interval = max(_INTERVAL, ranks / _RANKS_PER_SECOND)
        self._places: list[RankState | None] = [None] * ranks
        self._watch = HangWatch(ranks, timeout, self._state, _worked, delayed=True)
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
                thread.join(_LAST_EXCHANGE)  # with a timeout: the store may be gone

    def _everyone(self) -> list[RankState | None]:
        return self._places

    def _state(self, rank: int) -> ProcessState:
        place = self._places[rank]
        return state_if_here(place.process) if place else ProcessState.RUNNING

    def _beat(self) -> None:
        looked, seen = time.monotonic(), -1
        while not self._over.wait(_INTERVAL):
            place = self.heartbeat.place()
            self.heartbeat.beat(worked_seconds(os.getpid()) if place.progress == seen else place.worked)
            now, seen = time.monotonic(), place.progress
            seconds, looked = min(now - looked, _LONGEST_STEP), now
            if error := self._lost.observe(place, self._exchanges, seconds):
                self._tell(Failure(0, error, now, silent=True), False)
                self._end()

    def _exchange(self) -> None:
        """Exchange pages with the store, reconnecting when the connection is lost."""
        while not self._over.is_set():
            with suppress(Exception):  # a late answer, or the store ended with the process that holds it
                self._exchange_over_one()
                return
            self._over.wait(self._interval)

    def _exchange_over_one(self) -> None:
        """Send this rank's page and look for a verdict, repeatedly; on a judge also read all pages."""
        store: Any = self._store  # torch's stub lacks `clone`
        store = store.clone()
        store.set_timeout(timedelta(seconds=max(self._timeout, 1)))
        judges = self._rank in (0, self._ranks // 2, self._ranks - 1)
        keys = [_key(rank) for rank in range(self._ranks)]
        for key in keys if judges else ():
            store.compare_set(key, "", _NOTHING)
        looked = time.monotonic()
        while True:
            over = self._over.is_set()
            store.set(keys[self._rank], self.heartbeat.content())
            if over:
                return
            if store.check([_VERDICT]):
                self._end(json.loads(store.get(_VERDICT)))
            if judges:
                self._places = [_place(page) for page in store.multi_get(keys)]
                now = time.monotonic()
                seconds, looked = min(now - looked, _LONGEST_STEP), now
                if hang := self._watch.observe(self._places, seconds):
                    self._judge(store, hang)
            self._exchanges += 1
            self._over.wait(self._interval)

    def _judge(self, store: "Store", hang: Hang) -> None:
        """Report the hang unless another judge has, publish the verdict, and end."""
        self._judges = self._judges or int(store.add(_CLAIM, 1)) == 1
        if not self._judges:
            return  # the other judge's verdict follows
        if int(store.add(REPORTS, 1)) == 1:  # otherwise another failure has been reported
            self._tell(Failure(hang.ranks[0], hang.error, time.monotonic(), silent=True), True)
        processes = [place.process for rank in hang.ranks if (place := self._places[rank])]
        store.set(_VERDICT, json.dumps(processes))
        time.sleep(2 * self._interval)  # this process may hold the store, where the others must find the verdict
        self._end(processes)

    def _end(self, hung: Sequence[str] = ()) -> NoReturn:
        """End the hung processes that are on this host, then this one."""
        with self._ending:
            self._on_hang()
            for process in hung:
                if process != self._process:
                    kill_if_here(process, signal.SIGKILL)
            os._exit(_EXIT_STATUS)


def _worked(rank: int, place: RankState) -> float:
    return worked_if_here(place.process) or place.worked


def _key(rank: int) -> str:
    return f"hang/page/{rank}"


def _place(page: bytes) -> RankState | None:
    return None if page == _NOTHING.encode() else read(page)
