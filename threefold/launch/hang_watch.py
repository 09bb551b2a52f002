"""Hangs: which rank does not answer, from the heartbeats of all, on one host and over a launcher's store."""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from threefold.comm.heartbeat import Heartbeat, RankState, RunSection, Wait
from threefold.launch.output import log_file
from threefold.output import replace_link

_OWN_TIMES, _TIMES = slice(11, 13), slice(11, 15)  # user and system time; with those of children that have ended
_NICENESS, _STARTED = 16, 19


class ProcessState(Enum):
    """Whether a process runs."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"


def process_state(pid: int) -> ProcessState:
    """The state of a process of this host; `RUNNING` where the system does not tell."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (OSError, ValueError):
        return ProcessState.RUNNING
    if status.get("TracerPid", "0") != "0":
        return ProcessState.TRACED
    return ProcessState.STOPPED if status.get("State", "").startswith("T") else ProcessState.RUNNING


def worked_seconds(pid: int) -> float:
    """Seconds for which a process of this host and its children, such as a compiler, have had work for a processor.

    Those for which their threads had one, but for threads of lower priority, such as one that writes a checkpoint
    beside the training; and those for which their main threads waited for one. 0 where the system does not tell, as of
    a process that has ended.
    """
    try:
        fields = _fields(f"/proc/{pid}/stat")
        ticks, niceness = sum(map(int, fields[_TIMES])), int(fields[_NICENESS])
    except (OSError, ValueError):
        return 0.0
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError):
                fields = _fields(f"/proc/{pid}/task/{thread}/stat")
                if int(fields[_NICENESS]) > niceness:
                    ticks -= sum(map(int, fields[_OWN_TIMES]))
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    worked = ticks / os.sysconf("SC_CLK_TCK")
    with suppress(OSError, IndexError, ValueError):  # not counted by every kernel
        worked += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return worked + sum(map(worked_seconds, children))


def _fields(stat: str) -> list[str]:
    """The fields of a file as `man proc_pid_stat` has it, from the third on."""
    return Path(stat).read_text().rpartition(")")[2].split()


def identify_process(pid: int) -> str:
    """What tells a process from all others, on this host and on others; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = _fields(f"/proc/{pid}/stat")[_STARTED]
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {started} {pid}"


def is_here(identity: str) -> bool:
    """Whether an identity is that of a process of this host that has not ended."""
    return bool(identity) and identity == identify_process(_pid(identity))


def kill_if_here(identity: str, number: int) -> None:
    """Send a signal to the process of an identity, if it is one of this host that has not ended."""
    if is_here(identity):
        with suppress(OSError):
            os.kill(_pid(identity), number)


def state_if_here(identity: str) -> ProcessState:
    """The state of the process of an identity; `RUNNING` where it is on another host."""
    return process_state(_pid(identity)) if is_here(identity) else ProcessState.RUNNING


def worked_if_here(identity: str) -> float:
    """As `worked_seconds`, of the process of an identity; 0 where it is on another host."""
    return worked_seconds(_pid(identity)) if is_here(identity) else 0.0


def _pid(identity: str) -> int:
    return int(identity.rpartition(" ")[2])


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


INTERVAL: Final = 0.5
"""Seconds between two beats."""


@contextmanager
def beating(heartbeat: Heartbeat, on_request: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Beat within the block.

    Args:
        heartbeat: of this rank.
        on_request: called once where a reader of the page asks for it.
    """
    over = threading.Event()

    def beat() -> None:
        while True:
            heartbeat.beat()
            if heartbeat.is_asked:
                on_request()
                heartbeat.answer()
            if over.wait(INTERVAL):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


_COLLECTIVES: Final = 2000
"""The newest ones, which are kept."""


def keep_records(run_dir: Path | None) -> None:
    """Have NCCL keep a record of its collectives; call before the process group is initialised.

    Only environment variables set this.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_COLLECTIVES))
    if run_dir is not None:  # where NCCL writes by itself, when its own timeout is over
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(_prefix(run_dir)))


def write_records(run_dir: Path | None, rank: int) -> None:
    """Write this rank's record to RUN/logs, where there are a record and a folder."""
    from threefold.torch_private.distributed import nccl_records

    records = nccl_records() if run_dir is not None else None
    if run_dir is None or records is None:
        return
    with suppress(OSError):
        replace_link(Path(f"{_prefix(run_dir)}{rank}")).write_bytes(records)


def _prefix(run_dir: Path) -> Path:
    return log_file(run_dir, 0).parent / "flight_recorder_"
