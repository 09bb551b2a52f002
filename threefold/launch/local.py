"""A run whose ranks are processes of this host, started, watched and ended here.

`torch.distributed.elastic.multiprocessing` would start them too, but shows a rank on the console only through a thread
that polls its log file (so that no progress bar works), passes errors through environment variables and files, leaves
its workers alive when it is killed itself, and writes a report of many lines: what is below is shorter than mending
that.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

from threefold.errors import UserError
from threefold.launch.failure import Failure, cause, from_exception, from_exit_code
from threefold.launch.output import log_file
from threefold.launch.process import die_with_parent
from threefold.launch.signals import NUMBERS, Asked, StopRequested, StopSignals, held_back, let_in
from threefold.launch.worker import Job, RankInfo, never, stay_on_loopback, work

StartMethod = Literal["fork", "spawn"]

LOOPBACK = "127.0.0.1"
OTHER_FAILURES = 0.5
"""Seconds to hear of the failures of other ranks after the first, one of which may be the cause."""
GOODBYE = 3.0
"""Seconds that a rank may take to end when it is killed."""
LAST_WORDS = 2.0
"""Seconds for what the ranks printed to reach the console."""


class _Rank(NamedTuple):
    """A started rank: its process, and the pipe on which it tells how it failed."""

    process: BaseProcess
    report: Connection


def run_local(job: Job, world_size: int, start_method: StartMethod, signals: StopSignals | None = None) -> object:
    """Run the job on `world_size` processes of this host and return when all have ended.

    Args:
        start_method: "fork" is quick and for a parent that ran no parallel operation yet; CUDA needs "spawn".
        signals: passed on to the ranks of a job that stops when it is asked to.

    Returns:
        what the worker of rank 0 returned.

    Raises:
        UserError: a rank raised it.
        RankFailed: a rank failed otherwise; all have been ended.
        StopRequested: a second signal came; all ranks have been killed.
    """
    import torch.distributed as dist

    with socket.create_server((LOOPBACK, 0), backlog=1024) as listener, _ended() as ranks:
        port = listener.getsockname()[1]
        for rank in range(world_size):
            info = RankInfo(rank, world_size, rank, world_size, job.device)
            with held_back():  # or a signal would come between the start of a process and its place in the list
                ranks.append(_start(job, info, port, start_method))
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        with signals.passed_to(partial(_ask, ranks)) if signals else nullcontext():
            failures, result = _watch(ranks)
        del store  # it serves until the ranks are done
    if failures:
        raise cause(failures).exception(job.run_dir)
    return result


def _start(job: Job, info: RankInfo, port: int, start_method: StartMethod) -> _Rank:
    context: Any = multiprocessing.get_context(start_method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(job, info, port, sender, os.getpid()), name=f"rank {info.rank}")
    process.start()
    sender.close()
    return _Rank(process, receiver)


def _ask(ranks: list[_Rank], number: int, again: bool) -> None:
    """Pass a signal on to the ranks; end all on a second one."""
    if again:
        raise StopRequested(number, again)
    for rank in ranks:
        if rank.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid or 0, signal.SIGTERM)


def _main(job: Job, info: RankInfo, port: int, report: Connection, parent: int) -> None:
    """A rank's process."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C too, and ends all
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asked = Asked() if job.stops else never
    let_in()
    try:
        with job.output_of(info.rank):
            import torch.distributed as dist

            stay_on_loopback()
            store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
            result = work(job, replace(info, asked=asked), store)
        if info.rank == 0:
            report.send(result)
    except BaseException as error:
        report.send(from_exception(info.rank, error))
        write_traceback(job, info.rank, error)
        # no clean-up: a collective that waits for a lost neighbour would hold it up
        os._exit(1)


def write_traceback(job: Job, rank: int, error: BaseException) -> None:
    """Put the traceback into the rank's log; the console gets one message for the whole run."""
    if isinstance(error, UserError):
        return
    if job.run_dir is None:
        traceback.print_exception(error)
        sys.stderr.flush()
        return
    with suppress(OSError), log_file(job.run_dir, rank).open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)


def _watch(ranks: list[_Rank]) -> tuple[list[Failure], object]:
    """Wait until all ranks have ended, or one has failed and the others had the time to say that they did.

    Returns:
        the failures, and what rank 0 returned.
    """
    told: dict[int, object] = {}
    failures: dict[int, Failure] = {}
    running: dict[Any, int] = {rank.process.sentinel: number for number, rank in enumerate(ranks)}
    reports: dict[Any, int] = {rank.report: number for number, rank in enumerate(ranks)}
    deadline = None
    while running:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        for event in wait([*running, *reports], left):
            if event in reports:
                number = reports.pop(event)
                _hear(ranks[number], number, told, failures)
            elif event in running:  # else the report of a rank whose end, in the same batch, had it read
                number = running.pop(event)
                code = _exit_code(ranks[number].process)
                if reports.pop(ranks[number].report, None) is not None and ranks[number].report.poll():
                    _hear(ranks[number], number, told, failures)
                if code and number not in failures:
                    failures[number] = from_exit_code(number, code)
        if failures and deadline is None:
            deadline = time.monotonic() + OTHER_FAILURES
    return list(failures.values()), told.get(0)


def _hear(rank: _Rank, number: int, told: dict[int, object], failures: dict[int, Failure]) -> None:
    """Take what a rank tells at its end: how it failed, or what it returned."""
    with suppress(EOFError):
        report = rank.report.recv()
        (failures if isinstance(report, Failure) else told)[number] = report


def _exit_code(process: BaseProcess) -> int:
    process.join()
    return process.exitcode or 0


@contextmanager
def _ended() -> Iterator[list[_Rank]]:
    """A list of ranks that have all ended afterwards, by themselves or not."""
    ranks: list[_Rank] = []
    try:
        yield ranks
    finally:
        with _undisturbed():
            alive = [rank.process for rank in ranks if rank.process.is_alive()]
            for process in alive:
                process.kill()
            deadline = time.monotonic() + GOODBYE
            for process in alive:
                process.join(max(0, deadline - time.monotonic()))
            _wait_for_console(ranks)


def _wait_for_console(ranks: list[_Rank]) -> None:
    """Wait until the processes that copy to the console have written all: they hold the reports' other ends."""
    reports: dict[Any, Connection] = {rank.report: rank.report for rank in ranks}
    deadline = time.monotonic() + LAST_WORDS
    while reports and (ready := wait(list(reports), max(0, deadline - time.monotonic()))):
        for event in ready:
            try:
                reports[event].recv()
            except (EOFError, OSError):
                del reports[event]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No further signal while the ranks are being ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
