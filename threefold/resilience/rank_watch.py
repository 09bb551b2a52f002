"""Watch of the ranks of a run: report the rank that does not answer, and end the run, when `HangWatch` finds a hang.

`LocalWatch` reads the heartbeats of ranks that this host's launcher has started, from shared memory; `StoreWatch` sends
those of ranks of torchrun or Slurm over the launcher's store.
"""

import json
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

from threefold.comm.heartbeat import Heartbeat, RunSection
from threefold.errors import UserError
from threefold.foreign import nofollow_file, write_nofollow
from threefold.launch.environment import LaunchedRank
from threefold.launch.failure import Failure, claims_report, is_first_to_report
from threefold.launch.local import LOOK, StartMethod
from threefold.launch.output import log_file
from threefold.launch.worker import Job
from threefold.resilience.hang_watch import HangWatch, LostStore, Stopwatch
from threefold.resilience.heartbeat import PAGE_BYTES, Page
from threefold.resilience.processes import ProcessState, identify_process, pid_if_here, process_state, worked_seconds
from threefold.resilience.rank_state import RankState, WatchedHeartbeat, ask, read

BEAT: Final = 0.5
"""Seconds between two beats, and between two exchanges with a launcher's store in a small world."""


class LocalWatch:
    """Watch of ranks that are processes of this host, whose heartbeats are in memory that they share with this process.

    Made before the ranks are started, and passed to them.
    """

    def __init__(self, job: Job, ranks: int, start_method: StartMethod) -> None:
        self._job, self._memory = job, shared_bytes(start_method, ranks * PAGE_BYTES)

    def heartbeat(self, rank: int) -> WatchedHeartbeat:
        """Return the heartbeat of a rank that starts, in its process."""
        pages = self._pages()
        heartbeat = WatchedHeartbeat(pages[rank], lambda: [read(page) for page in pages])
        heartbeat.section(RunSection.START)
        return heartbeat

    def beating(self, rank: int, heartbeat: WatchedHeartbeat) -> AbstractContextManager[None]:
        """Beat within the block, in the rank's process."""
        return _beating(heartbeat, _recorder(self._job, rank))

    def finder(self, pids: Sequence[int]) -> Callable[[Collection[int]], Failure | None]:
        """Return a function to call every `LOOK` seconds with the ranks that have no process any more.

        It returns the failure of the rank that does not answer, by its page and its process; None if all do. Over NCCL
        it first waits until the other ranks have written their flight recorders.
        """
        pages = self._pages()

        def worked(rank: int, place: RankState) -> float:
            # A page does not show who computes: native code may keep the thread that beats from running.
            return worked_seconds(pids[rank])

        watch = HangWatch(len(pids), self._job.timeout, lambda rank: process_state(pids[rank]), worked)
        stopwatch = Stopwatch(LOOK)

        def look(ended: Collection[int]) -> Failure | None:
            hang = watch.observe([read(page) for page in pages], stopwatch.passed(), ended)
            if hang is None:
                return None
            if self._job.over_nccl:
                asked = [page for rank, page in enumerate(pages) if rank not in (*ended, *hang.ranks)]
                for page in asked:
                    ask(page)
                deadline = time.monotonic() + 3.0  # for ranks to write their flight recorders
                while time.monotonic() < deadline and not all(read(page).answered for page in asked):
                    time.sleep(LOOK)
            return Failure(hang.ranks[0], hang.error, time.monotonic(), silent=True)

        return look

    def _pages(self) -> list[Page]:
        """Return the page of each rank."""
        view = memoryview(self._memory).cast("B")
        return [view[start : start + PAGE_BYTES] for start in range(0, len(view), PAGE_BYTES)]


def shared_bytes(start_method: StartMethod, size: int) -> Any:
    """Return memory that the ranks of a start method share with this process."""
    if start_method == "fork":
        return mmap.mmap(-1, size)  # without a file, for which there may be no place
    try:
        return multiprocessing.get_context(start_method).RawArray("b", size)
    except OSError as error:
        raise UserError(
            f"The heartbeats of ranks that are spawned need a file in /dev/shm or TMPDIR, and there can be none "
            f"({error.strerror}); make /dev/shm writable, or set train.timeout to 0, which does without heartbeats."
        ) from None


@contextmanager
def watch_launched(job: Job, launched: LaunchedRank, store: Any) -> Iterator[Heartbeat]:
    """Yield this rank's heartbeat; within the block, end this process when a rank does not answer."""
    rank = launched.rank

    def tell(failure: Failure, alone: bool) -> None:
        claimed = rank == 1 if job.run_dir is None else claims_report(job.run_dir, failure)
        if alone or claimed:
            with suppress(OSError):
                os.write(console, f"Error: {failure.message(job.run_dir)}.\n".encode())

    console = os.dup(2)  # the rank's own output goes to its log
    try:
        watch = StoreWatch(store, rank, launched.world_size, job.timeout, tell, _recorder(job, rank))
        watch.heartbeat.section(RunSection.START)
        with watch.watching():
            yield watch.heartbeat
    finally:
        os.close(console)


_NOTHING: Final = "-"  # value of a page that has not been written yet
_CLAIM, _VERDICT = "hang/claim", "hang/verdict"


class StoreWatch:
    """Find the rank that does not answer, from every rank over the launcher's store.

    Every rank sends its page to the store. Up to three ranks, the judges, read all pages. The first of them that finds
    a hang claims it, reports it and publishes the verdict, which all ranks look for.

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
        self.heartbeat = WatchedHeartbeat(everyone=self._places.copy)
        self._process = identify_process(os.getpid())
        self.heartbeat.identify(self._process)
        self._store, self._rank, self._ranks, self._timeout, self._tell = store, rank, ranks, timeout, tell
        self._on_hang = on_hang
        self._interval = max(BEAT, ranks / 2000)  # the store takes and gives so many pages a second
        self._watch = HangWatch(ranks, timeout, self._state, self._worked, delayed=True)
        self._lost = LostStore(rank, timeout)
        self._exchanges, self._has_claimed = 0, False
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
            place = read(self.heartbeat.content())
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
                if hang and not self._has_claimed:
                    self._has_claimed = int(store.add(_CLAIM, 1)) == 1
                if hang and self._has_claimed:  # otherwise the other judge's verdict follows
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


@contextmanager
def _beating(heartbeat: WatchedHeartbeat, on_request: Callable[[], None]) -> Iterator[None]:
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


def _recorder(job: Job, rank: int) -> Callable[[], None]:
    """Make NCCL record its collectives, and return a function that writes the records of `rank` to RUN/logs, if any.

    Only environment variables set this; call before the process group is initialised.
    """
    if not job.over_nccl:
        return lambda: None
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the newest collectives that are kept
    if job.run_dir is None:
        return lambda: None
    prefix = log_file(job.run_dir, 0).parent / "flight_recorder_"
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))  # NCCL writes there when its own timeout is over

    with suppress(OSError):
        nofollow_file(Path(f"{prefix}{rank}"))  # for NCCL

    def write() -> None:
        from threefold.torch_private.distributed import nccl_records

        if (records := nccl_records()) is not None:
            with suppress(OSError):
                write_nofollow(Path(f"{prefix}{rank}"), records)

    return write
