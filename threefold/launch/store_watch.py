"""Watch for ranks that do not answer through a launcher's store, from every rank."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn

from threefold.comm.heartbeat import Heartbeat, RankState, read
from threefold.launch.failure import Failure, is_first_to_report
from threefold.launch.hang_watch import BEAT, Hang, HangWatch, LostStore, Stopwatch
from threefold.launch.process import ProcessState, identify_process, pid_if_here, process_state, worked_seconds

if TYPE_CHECKING:
    from torch.distributed import Store


_RANKS_PER_SECOND: Final = 2000  # pages per second that the store takes and gives
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
        self._places: list[RankState | None] = [None] * ranks
        self.heartbeat = Heartbeat(everyone=self._places.copy)
        self._process = identify_process(os.getpid())
        self.heartbeat.identify(self._process)
        self._store, self._rank, self._ranks, self._timeout, self._tell = store, rank, ranks, timeout, tell
        self._on_hang = on_hang
        self._interval = max(BEAT, ranks / _RANKS_PER_SECOND)
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

    def _state(self, rank: int) -> ProcessState:
        place = self._places[rank]
        pid = pid_if_here(place.process) if place else None
        return ProcessState.RUNNING if pid is None else process_state(pid)

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
        """Send this rank's page and look for a verdict, repeatedly; on a judge also read all pages."""
        store: Any = self._store  # torch's stub lacks `clone`
        store = store.clone()
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
                self._places[:] = [_place(page) for page in store.multi_get(keys)]
                if hang := self._watch.observe(self._places, stopwatch.passed()):
                    self._judge(store, hang)
            self._exchanges += 1
            self._over.wait(self._interval)

    def _judge(self, store: "Store", hang: Hang) -> None:
        """Report the hang unless another judge has, publish the verdict, and end."""
        self._judges = self._judges or int(store.add(_CLAIM, 1)) == 1
        if not self._judges:
            return  # the other judge's verdict follows
        if is_first_to_report(store):  # otherwise another failure has been reported
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
                if process != self._process and (pid := pid_if_here(process)) is not None:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            os._exit(_EXIT_STATUS)


def _worked(rank: int, place: RankState) -> float:
    pid = pid_if_here(place.process)
    return place.worked if pid is None else worked_seconds(pid) or place.worked


def _place(page: bytes) -> RankState | None:
    return None if page == _NOTHING.encode() else read(page)
