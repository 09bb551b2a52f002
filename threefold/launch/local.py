"""Run the ranks of a job as processes of this host: start and watch them, and collect their results or failures.

`torch.distributed.elastic.multiprocessing` does not keep what is promised here: it blames the first process that it
finds ended, which may only have lost its connection to the one that failed; prints a traceback; looks once a second;
shows output by reading two log files ten times a second, so that there is no terminal; and its agent restarts the same
ranks whatever the error was.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from bdb import BdbQuit
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, Literal, NamedTuple, NoReturn, cast

from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.foreign import open_nofollow
from threefold.launch.device import require_gpus
from threefold.launch.failure import Failure, cause, formatted, from_exception, from_exit_code
from threefold.launch.output import log_file
from threefold.launch.process import (
    NUMBERS,
    StopSignals,
    die_with_parent,
    note_signals,
    raise_on_second,
    shared_objects,
    signals_blocked,
)
from threefold.launch.worker import Job, RankInfo, Worker, listen_on_loopback, never, stay_on_loopback, work
from threefold.train.callbacks.base import CallbackFailed

StartMethod = Literal["fork", "spawn"]
RunLock = Callable[[], AbstractContextManager[object]]
"""Function that makes a context, which one process enters for all ranks before any starts, and leaves at the end."""
Again = Callable[[Failure], tuple[tuple[Any, ...], int] | None]
"""Function called with the cause of a failure when all ranks have ended. It returns the worker's arguments and the
number of ranks of the next attempt, or None to end without an error, or raises the error that ends the run."""

LOOK: Final = 0.25
"""Seconds between two calls of a watch for ranks that hang."""
OTHER_FAILURES: Final = 0.5
"""Seconds to wait after the first failure for failures of other ranks, one of which may be the cause."""


def spawn(
    worker: Worker,
    args: tuple[Any, ...],
    world_size: int,
    *,
    start_method: StartMethod | None = None,
    lock: RunLock = nullcontext,
    signals: StopSignals | None = None,
    again: Again | None = None,
    **options: Any,
) -> object:
    """Call `worker(rank_info, *args)` on new processes of this host, even under a launcher, until all have ended.

    Args:
        worker: function of an importable module.
        start_method: "fork", the default on the CPU, needs a process that has run no parallel torch operation; "spawn",
            the default on CUDA, needs an importable main module.
        lock: makes a context, such as a lock, entered once for all ranks.
        signals: handlers that forward signals to the ranks, which end when `rank_info.asked()` is not 0.
        again: decides after a failure whether the ranks start again.
        options: further fields of the `Job`.

    Returns:
        the result of rank 0's worker; None if `again` says that nothing is left to do.

    Raises:
        UserError: a rank raised it.
        RankFailed: a rank failed otherwise; all have been ended.
        StopRequested: a second signal came; all ranks have been killed.
    """
    job = Job(worker, args, **options)
    call_hook("require_room", world_size)
    if job.device == "cuda":
        require_gpus(world_size, job.backend)
    start_method = start_method or ("spawn" if job.device == "cuda" else "fork")
    # A signal between two attempts reaches the ranks of the next one.
    with lock(), signals.passed_to(raise_on_second) if signals and again else nullcontext():
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
            args, world_size = following
            job = replace(job, args=args)


class _Rank(NamedTuple):
    process: BaseProcess
    report: Connection
    """Pipe on which the rank reports its result or failure."""


def collect_local(
    job: Job, world_size: int, start_method: StartMethod, signals: StopSignals | None = None
) -> tuple[list[Failure], list[object]]:
    """Run the job once on `world_size` processes of this host; return the failures and the results by rank.

    Results are complete only without failures. See `spawn` for the arguments and `StopRequested`.
    """
    import torch.distributed as dist

    context: Any = multiprocessing.get_context(start_method)
    watch = call_hook("watch_local", job, world_size, start_method) if job.timeout else None

    def ask_to_stop(number: int, again: bool) -> None:
        raise_on_second(number, again)
        for rank in ranks:
            if rank.process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid or 0, signal.SIGTERM)

    with listen_on_loopback() as listener, shared_objects(), _ended() as ranks:
        host, port = listener.getsockname()[:2]
        for number in range(world_size):
            info = RankInfo(number, world_size, number, world_size, job.device, backend=job.backend)
            receiver, sender = context.Pipe(duplex=False)
            main_args = (job, info, (host, port), sender, os.getpid(), watch, signals is not None)
            process = context.Process(target=_main, args=main_args, name=f"rank {number}")
            with signals_blocked():  # or a signal could come between its start and its entry in the list
                process.start()
                ranks.append(_Rank(process, receiver))
            sender.close()
        handle = os.dup(listener.fileno())
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=handle)
        look = None
        if watch is not None and job.debug_rank is None:  # ranks wait for a debugged one as long as it takes
            look = watch.finder([rank.process.pid or 0 for rank in ranks])
        with signals.passed_to(ask_to_stop) if signals else nullcontext():
            failures, results = _watch(ranks, look)
        del store  # the store serves until the ranks are done
    return failures, [results.get(rank) for rank in range(world_size)]


def _main(
    job: Job,
    info: RankInfo,
    address: tuple[str, int],
    report: Connection,
    parent: int,
    watch: Any,
    stops: bool,
) -> None:
    """Run the job in a rank's process.

    The store of all ranks is at `address`, a host and a port; the process `parent` has started them. Without `watch`
    (`resilience.rank_watch.LocalWatch`), nobody reads heartbeats. The worker itself ends on a signal if `stops`.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends all ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asked = note_signals() if stops else never
    heartbeat = None if watch is None else watch.heartbeat(info.rank)
    beats = nullcontext() if watch is None else watch.beating(info.rank, heartbeat)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # blocked since before this process was started
    set_debugger(job.debug_rank, info.rank, named="--debug-rank" if job.run_dir else "")
    try:
        with job.output_of(info.rank), beats:
            import torch.distributed as dist

            stay_on_loopback()
            # Each rank looks up the address when it connects to the store. Without a network that takes 10 s, and of 64
            # ranks at once some wait 5 s for a lost answer. torch 2.13 cannot skip the look-up, so only this helps.
            os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
            store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
            result = work(job, replace(info, asked=asked, heartbeat=heartbeat), store)
        report.send(result)
    except BaseException as raised:
        quit_it = f"The debugger on rank {info.rank} was quit, which ends the run; type c to go on with it."
        error = UserError(quit_it) if BdbQuit in (type(raised), type(raised.__cause__)) else raised
        report.send(from_exception(info.rank, error))
        write_traceback(job, info.rank, error)
        # No clean-up: a collective that waits for a lost rank would block it.
        os._exit(1)


def _watch(
    ranks: list[_Rank], look: Callable[[Collection[int]], Failure | None] | None
) -> tuple[list[Failure], dict[int, object]]:
    """Wait until all ranks have ended or one is to blame; return the failures, and the results by rank.

    `look`, if there is one, returns the failure of a rank that does not answer, given those that have ended. Stops
    early when a rank does not answer or ended without a report, and `OTHER_FAILURES` seconds after any other failure.
    """
    results: dict[int, object] = {}
    failures: dict[int, Failure] = {}
    running: dict[Any, int] = {rank.process.sentinel: number for number, rank in enumerate(ranks)}
    reports: dict[Any, int] = {rank.report: number for number, rank in enumerate(ranks)}
    deadline = None

    def receive(number: int) -> None:
        with suppress(EOFError):
            report = ranks[number].report.recv()
            (failures if isinstance(report, Failure) else results)[number] = report

    while running:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        if look is not None and deadline is None:
            left = LOOK
            if hung := look(set(range(len(ranks))) - {*running.values()}):
                failures[hung.rank] = hung
                break
        for event in wait([*running, *reports], left):
            if event in reports:
                receive(reports.pop(event))
            elif event in running:  # otherwise a report already read when its rank ended
                number = running.pop(event)
                ranks[number].process.join()
                code = ranks[number].process.exitcode
                if reports.pop(ranks[number].report, None) is not None and ranks[number].report.poll():
                    receive(number)
                if code and number not in failures:
                    failures[number] = from_exit_code(number, code)
        if failures and deadline is None:
            deadline = time.monotonic() + OTHER_FAILURES
        if any(failure.silent for failure in failures.values()):
            break  # it is the cause, whatever the others say
    return list(failures.values()), results


@contextmanager
def _ended() -> Iterator[list[_Rank]]:
    """Yield a list for started ranks; on exit, with signals ignored, kill those that have not ended."""
    ranks: list[_Rank] = []
    try:
        yield ranks
    finally:
        in_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in NUMBERS if in_main}
        try:
            alive = [rank.process for rank in ranks if rank.process.is_alive()]
            for process in alive:
                process.kill()
            deadline = time.monotonic() + 3.0  # for killed ranks to end
            for process in alive:
                process.join(max(0, deadline - time.monotonic()))
            # The processes that copy output to the console hold the other ends of the pipes until they are done.
            reports = {rank.report for rank in ranks}
            deadline = time.monotonic() + 2.0  # until output is on the console
            while reports and (ready := wait(reports, max(0, deadline - time.monotonic()))):
                for report in cast("list[Connection]", ready):
                    try:
                        report.recv()
                    except (EOFError, OSError):
                        reports.remove(report)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def write_traceback(job: Job, rank: int, error: BaseException) -> None:
    """Write the traceback to the rank's log; the console gets one message for the whole run."""
    if isinstance(error, UserError) and not isinstance(error, CallbackFailed):
        return
    if job.run_dir is None:
        if job.prints_traceback:
            sys.stderr.write(formatted(error))
            sys.stderr.flush()
        return
    with suppress(OSError), open(open_nofollow(log_file(job.run_dir, rank), os.O_APPEND), "a", encoding="utf-8") as log:
        log.write(formatted(error))


def set_debugger(debug_rank: int | None, rank: int, named: str) -> None:
    """Give this process the terminal if its rank is `debug_rank`; otherwise make `breakpoint()` explain how to get one.

    A debugger that the user has configured stays, such as one that listens on a port. `named` is the command-line
    option that chooses the rank, if there is one.
    """
    if rank == debug_rank:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # `multiprocessing` closed it
        return
    is_custom = sys.breakpointhook is not sys.__breakpointhook__ and not _is_idle_debugger(sys.breakpointhook)
    if os.environ.get("PYTHONBREAKPOINT") or is_custom:
        return

    def refuse(*args: Any, **options: Any) -> NoReturn:
        how = f"start the run with {named} {rank}" if named else "call threefold.run with ranks=1, which starts none"
        raise UserError(f"breakpoint() is called on rank {rank}, whose process has no terminal; {how}.")

    sys.breakpointhook = refuse


def _is_idle_debugger(hook: Any) -> bool:
    """Return whether a hook is that of the debugger of a notebook's kernel, which does nothing without a client."""
    if getattr(hook, "__module__", "").partition(".")[0] not in ("debugpy", "pydevd", "_pydevd_bundle"):
        return False
    pydevd: Any = sys.modules.get("pydevd")
    return pydevd is None or pydevd.get_global_debugger() is None
