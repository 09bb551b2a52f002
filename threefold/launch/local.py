"""Run the ranks of a job as processes of this host, and collect their results or failures."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple, NoReturn

from threefold.comm.heartbeat import Heartbeat, RunSection
from threefold.errors import UserError
from threefold.launch.failure import Failure, cause, from_exception, from_exit_code
from threefold.launch.output import log_file
from threefold.launch.process import (
    NUMBERS,
    Asked,
    StopRequested,
    StopSignals,
    die_with_parent,
    shared_objects,
    signals_blocked,
    unblock_signals,
)
from threefold.launch.rank_watch import INTERVAL, LocalWatch, SharedPages
from threefold.launch.worker import Job, NextAttempt, RankInfo, never, shorten_name_lookups, stay_on_loopback, work
from threefold.output import replace_link
from threefold.train.callbacks.base import CallbackFailed


def set_debugger(debug_rank: int | None, rank: int, named: str) -> None:
    """Give this process the terminal if its rank is `debug_rank`; otherwise make `breakpoint()` explain how to get one.

    A debugger that the user has configured stays, such as one that listens on a port.

    Args:
        debug_rank: rank that gets the terminal; None for none.
        named: command-line option that chooses the rank; empty if there is none.
    """
    if rank == debug_rank:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # `multiprocessing` closed it
        return
    if os.environ.get("PYTHONBREAKPOINT") or sys.breakpointhook is not sys.__breakpointhook__:
        return

    def refuse(*args: Any, **options: Any) -> NoReturn:
        how = f"start the run with {named} {rank}" if named else "call threefold.run with ranks=1, which starts none"
        raise UserError(f"breakpoint() is called on rank {rank}, whose process has no terminal; {how}.")

    sys.breakpointhook = refuse


def told_quit(error: BaseException, rank: int) -> BaseException:
    """Return a readable error if a debugger was quit; any other error unchanged."""
    if BdbQuit not in (type(error), type(error.__cause__)):
        return error
    return UserError(f"The debugger on rank {rank} was quit, which ends the run; type c to go on with it.")


StartMethod = Literal["fork", "spawn"]

LOOPBACK = "127.0.0.1"
OTHER_FAILURES = 0.5
"""Seconds to wait after the first failure for those of other ranks, one of which may be the cause."""
KILL_TIMEOUT = 3.0
"""Seconds that a killed rank may take to end."""
FLUSH_TIMEOUT = 2.0
"""Seconds to wait until the ranks' output is on the console."""


class _Rank(NamedTuple):
    """Started rank: its process, and the pipe on which it reports its result or failure."""

    process: BaseProcess
    report: Connection


Again = Callable[[Failure], NextAttempt | None]
"""Called with the cause of a failure when all ranks have ended; returns the next attempt, or None to end without an
error. Raises the error that ends the run."""


def run_local(
    job: Job,
    world_size: int,
    start_method: StartMethod,
    signals: StopSignals | None = None,
    again: Again | None = None,
) -> object:
    """Run the job on `world_size` processes of this host and return when all have ended.

    Args:
        start_method: "fork" is quick and for a parent that has run no parallel operation yet; CUDA needs "spawn".
        signals: handlers that forward signals to the ranks of a job that handles them (`Job.stops`).
        again: decides after a failure whether the ranks start again.

    Returns:
        the result of rank 0's worker; None if `again` says that nothing is left to do.

    Raises:
        UserError: a rank raised it.
        RankFailed: a rank failed otherwise; all have been ended.
        StopRequested: a second signal came; all ranks have been killed.
    """
    # A signal between two attempts reaches the ranks of the next one.
    with signals.passed_to(_raise_second) if signals and again else nullcontext():
        while True:
            failures, results = collect_local(job, world_size, start_method, signals)
            if not failures:
                return results[0]
            failure = cause(failures)
            if again is None:
                raise failure.exception(job.run_dir)
            following = again(failure)
            if following is None:
                return None
            job, world_size = replace(job, args=following.args), following.world_size


def _raise_second(number: int, again: bool) -> None:
    if again:
        raise StopRequested(number, again)


def collect_local(
    job: Job, world_size: int, start_method: StartMethod, signals: StopSignals | None = None
) -> tuple[list[Failure], list[object]]:
    """Run the job once on `world_size` processes of this host; return the failures and the results by rank.

    Results are complete only without failures. See `run_local` for the arguments and `StopRequested`.
    """
    import torch.distributed as dist

    pages = SharedPages(multiprocessing.get_context(start_method), world_size) if job.timeout else None
    with socket.create_server((LOOPBACK, 0), backlog=1024) as listener, shared_objects(), _ended() as ranks:
        port = listener.getsockname()[1]
        for rank in range(world_size):
            info = RankInfo(rank, world_size, rank, world_size, job.device, backend=job.backend)
            with signals_blocked():  # or a signal could come between the start of a process and its entry in the list
                ranks.append(_start(job, info, port, start_method, pages))
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        with signals.passed_to(partial(_ask, ranks)) if signals else nullcontext():
            failures, results = _watch(ranks, _hang_watch(job, ranks, pages))
        del store  # the store serves until the ranks are done
    return failures, [results.get(rank) for rank in range(world_size)]


def _hang_watch(job: Job, ranks: list[_Rank], pages: SharedPages | None) -> LocalWatch | None:
    if pages is None or job.debug_rank is not None:  # ranks wait for a debugged one as long as it takes
        return None
    return LocalWatch(pages, [rank.process.pid or 0 for rank in ranks], job.timeout, asks=job.over_nccl)


def _start(job: Job, info: RankInfo, port: int, start_method: StartMethod, pages: SharedPages | None) -> _Rank:
    context: Any = multiprocessing.get_context(start_method)
    receiver, sender = context.Pipe(duplex=False)
    args = (job, info, port, sender, os.getpid(), pages)
    process = context.Process(target=_main, args=args, name=f"rank {info.rank}")
    process.start()
    sender.close()
    return _Rank(process, receiver)


def _ask(ranks: list[_Rank], number: int, again: bool) -> None:
    """Forward a signal to the ranks; raise on a second one."""
    _raise_second(number, again)
    for rank in ranks:
        if rank.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid or 0, signal.SIGTERM)


def _main(job: Job, info: RankInfo, port: int, report: Connection, parent: int, pages: SharedPages | None) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends all ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asked = Asked() if job.stops else never
    heartbeat = Heartbeat() if pages is None else pages.heartbeat(info.rank)
    heartbeat.section(RunSection.START)
    unblock_signals()
    set_debugger(job.debug_rank, info.rank, named="--debug-rank" if job.run_dir else "")
    try:
        with job.output_of(info.rank), nullcontext() if pages is None else job.beating(heartbeat, info.rank):
            import torch.distributed as dist

            stay_on_loopback()
            shorten_name_lookups()
            store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
            result = work(job, replace(info, asked=asked, heartbeat=heartbeat), store)
        report.send(result)
    except BaseException as raised:
        error = told_quit(raised, info.rank)
        report.send(from_exception(info.rank, error))
        write_traceback(job, info.rank, error)
        # No clean-up: a collective that waits for a lost rank would block it.
        os._exit(1)


def write_traceback(job: Job, rank: int, error: BaseException) -> None:
    """Write the traceback to the rank's log; the console gets one message for the whole run."""
    if isinstance(error, UserError) and not isinstance(error, CallbackFailed):
        return
    if job.run_dir is None:
        if job.prints_traceback:
            traceback.print_exception(error)
            sys.stderr.flush()
        return
    with suppress(OSError), replace_link(log_file(job.run_dir, rank)).open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)


def _watch(ranks: list[_Rank], hangs: LocalWatch | None) -> tuple[list[Failure], dict[int, object]]:
    """Wait until all ranks have ended or one is to blame; return the failures, and the results by rank.

    Stops early when a rank does not answer or its process ended without a report, and `OTHER_FAILURES` seconds after
    any other first failure.
    """
    results: dict[int, object] = {}
    failures: dict[int, Failure] = {}
    running: dict[Any, int] = {rank.process.sentinel: number for number, rank in enumerate(ranks)}
    reports: dict[Any, int] = {rank.report: number for number, rank in enumerate(ranks)}
    deadline = None
    while running:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        if hangs is not None and deadline is None:
            left = INTERVAL
            if hung := hangs.look(set(range(len(ranks))) - {*running.values()}):
                failures[hung.rank] = hung
                break
        for event in wait([*running, *reports], left):
            if event in reports:
                number = reports.pop(event)
                _receive(ranks[number], number, results, failures)
            elif event in running:  # otherwise a report already read when its rank ended
                number = running.pop(event)
                code = _exit_code(ranks[number].process)
                if reports.pop(ranks[number].report, None) is not None and ranks[number].report.poll():
                    _receive(ranks[number], number, results, failures)
                if code and number not in failures:
                    failures[number] = from_exit_code(number, code)
        if failures and deadline is None:
            deadline = time.monotonic() + OTHER_FAILURES
        if any(failure.silent for failure in failures.values()):
            break  # it is the cause, whatever the others say
    return list(failures.values()), results


def _receive(rank: _Rank, number: int, results: dict[int, object], failures: dict[int, Failure]) -> None:
    with suppress(EOFError):
        report = rank.report.recv()
        (failures if isinstance(report, Failure) else results)[number] = report


def _exit_code(process: BaseProcess) -> int:
    process.join()
    return process.exitcode or 0


@contextmanager
def _ended() -> Iterator[list[_Rank]]:
    """Yield a list for started ranks; on exit, kill those that have not ended."""
    ranks: list[_Rank] = []
    try:
        yield ranks
    finally:
        with _signals_ignored():
            alive = [rank.process for rank in ranks if rank.process.is_alive()]
            for process in alive:
                process.kill()
            deadline = time.monotonic() + KILL_TIMEOUT
            for process in alive:
                process.join(max(0, deadline - time.monotonic()))
            _wait_for_console(ranks)


def _wait_for_console(ranks: list[_Rank]) -> None:
    """Wait until the processes that copy output to the console are done: they hold the other ends of the pipes."""
    reports: dict[Any, Connection] = {rank.report: rank.report for rank in ranks}
    deadline = time.monotonic() + FLUSH_TIMEOUT
    while reports and (ready := wait(list(reports), max(0, deadline - time.monotonic()))):
        for event in ready:
            try:
                reports[event].recv()
            except (EOFError, OSError):
                del reports[event]


@contextmanager
def _signals_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
