"""Run a function on all ranks: on processes of this host, or in the ranks that torchrun or Slurm started."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from threefold.comm.heartbeat import Heartbeat, RunSection, wait_code
from threefold.errors import UserError
from threefold.launch.device import Backend, require_gpus
from threefold.launch.environment import LaunchedRank, find_launched_rank
from threefold.launch.failure import REPORTS, Failure, RankFailed, from_exception, lost_rank_zero, of_lost_peer
from threefold.launch.local import Again, StartMethod, run_local, write_traceback
from threefold.launch.output import failure_file
from threefold.launch.process import StopSignals, require_room
from threefold.launch.rendezvous import meet
from threefold.launch.worker import Device, Job, RankInfo, Worker, never, work

_OWNED = "owned"

Ownership = Callable[[], AbstractContextManager[object]]
"""Makes a context that one process enters for all ranks before any starts, and leaves at the end."""


def run(
    worker: Worker,
    args: tuple[Any, ...],
    world_size: int,
    *,
    device: Device = "cpu",
    run_dir: Path | None = None,
    console_ranks: tuple[int, ...] = (0,),
    own: Ownership = nullcontext,
    signals: StopSignals | None = None,
    timeout: float = 0.0,
    again: Again | None = None,
    backend: Backend = "auto",
    debug_rank: int | None = None,
) -> object:
    """Call `worker(rank_info, *args)` on every rank with `torch.distributed` initialised, and wait for the end.

    Under torchrun or Slurm's srun this process is one rank; otherwise the ranks are started here.

    Args:
        worker: function of an importable module.
        run_dir: folder whose logs/rank_*.log get the ranks' output; None does not redirect it.
        console_ranks: ranks whose output is also shown on the console.
        own: makes a context, such as a lock, entered once for all ranks; a `UserError` from it is raised for all ranks.
        signals: handlers for a worker that ends when `rank_info.asked()` is not 0; without, signals end the processes.
        timeout: seconds that a rank may make no progress while another one waits for it; 0 for no limit.
        again: called after a failure of ranks that are started here; returns the next attempt (see `run_local`).
        backend: backend of the collectives, as in `RankInfo`.
        debug_rank: rank started here that has the terminal, for a debugger.

    Returns:
        the worker's result on the rank of this process, or on rank 0 if the ranks are started here.

    Raises:
        UserError: the launcher's world size differs, there are too few GPUs, or a rank started here raised it.
        StopRequested: a signal came before any rank started, or a second one.
        RankFailed: a rank failed; all have been ended.
        SystemExit: this launcher's rank failed after another one, which reports the failure.
    """
    launched = find_launched_rank()
    if launched is None:
        return spawn(
            worker,
            args,
            world_size,
            device=device,
            run_dir=run_dir,
            console_ranks=console_ranks,
            own=own,
            signals=signals,
            timeout=timeout,
            again=again,
            backend=backend,
            debug_rank=debug_rank,
        )
    if launched.world_size != world_size:
        raise UserError(
            f"The launcher started {launched.world_size} ranks but the layout needs {world_size}; start {world_size}."
        )
    job = Job(worker, args, device, run_dir, console_ranks, signals is not None, timeout=timeout, backend=backend)
    return _run_here(job, launched, own, signals)


def spawn(
    worker: Worker,
    args: tuple[Any, ...],
    world_size: int,
    *,
    device: Device = "cpu",
    run_dir: Path | None = None,
    console_ranks: tuple[int, ...] = (0,),
    start_method: StartMethod | None = None,
    own: Ownership = nullcontext,
    signals: StopSignals | None = None,
    timeout: float = 0.0,
    again: Again | None = None,
    backend: Backend = "auto",
    debug_rank: int | None = None,
) -> object:
    """Call `worker(rank_info, *args)` on new processes of this host, even under a launcher; otherwise like `run`.

    Args:
        start_method: "fork", the default on the CPU, needs a process that has run no parallel torch operation; "spawn",
            the default on CUDA, needs an importable main module.
    """
    require_room(world_size)
    if device == "cuda":
        require_gpus(world_size, backend)
    job = Job(worker, args, device, run_dir, console_ranks, signals is not None, True, timeout, backend, debug_rank)
    with own():
        return run_local(job, world_size, start_method or ("spawn" if device == "cuda" else "fork"), signals, again)


def _run_here(job: Job, launched: LaunchedRank, own: Ownership, signals: StopSignals | None) -> object:
    if job.device == "cuda":
        require_gpus(launched.local_world_size, job.backend)
    asked = (lambda: signals.received) if signals else never
    place = (launched.rank, launched.world_size, launched.local_rank, launched.local_world_size)
    info = RankInfo(*place, job.device, asked, backend=job.backend)
    store = None
    try:
        store = meet(launched, job.timeout)
        with ExitStack() as stack:
            if job.timeout and launched.world_size > 1:
                info = replace(info, heartbeat=stack.enter_context(_watched(job, launched, store)))
            heartbeat = info.heartbeat or Heartbeat()
            with heartbeat.waiting(wait_code("gather", heartbeat.axis("world", range(launched.world_size)))):
                refusal = _enter(stack, own, launched, store, job.run_dir)
            if not refusal:
                stack.enter_context(job.output_of(launched.rank))
                stack.enter_context(signals.noted() if signals else nullcontext())
                return work(job, info, store)
    except Exception as error:
        write_traceback(job, launched.rank, error)
        failure = _to_report(store, from_exception(launched.rank, error), error, job.run_dir)
        if failure is not None:
            raise RankFailed(failure.message(job.run_dir)) from error
        sys.exit(1)
    raise UserError(refusal)


@contextmanager
def _watched(job: Job, launched: LaunchedRank, store: Any) -> Iterator[Heartbeat]:
    """Yield this rank's heartbeat; within the block, end this process when a rank does not answer."""
    from threefold.launch.hang_watch import keep_records, write_records
    from threefold.launch.rank_watch import StoreWatch

    console, rank = os.dup(2), launched.rank  # the rank's own output goes to its log

    def tell(failure: Failure, alone: bool) -> None:
        claimed = rank == 1 if job.run_dir is None else _claim(job.run_dir, failure)
        if alone or claimed:
            with suppress(OSError):
                os.write(console, f"Error: {failure.message(job.run_dir)}.\n".encode())

    def write() -> None:
        if job.over_nccl:
            write_records(job.run_dir, rank)

    if job.over_nccl:
        keep_records(job.run_dir)
    watch = StoreWatch(store, rank, launched.world_size, job.timeout, tell, write)
    watch.heartbeat.section(RunSection.START)
    with watch.watching():
        yield watch.heartbeat
    os.close(console)


def _enter(stack: ExitStack, own: Ownership, launched: LaunchedRank, store: Any, run_dir: Path | None) -> str:
    """Enter `own` on rank 0; return the message of its `UserError` on every rank, empty if it raised none."""
    refusal = ""
    if launched.rank == 0:
        try:
            stack.enter_context(own())
        except UserError as error:
            refusal = str(error)
        if run_dir is not None and not refusal:
            with suppress(OSError):  # no such file or folder yet
                failure_file(run_dir).unlink()
        store.set(_OWNED, refusal)
    store.wait([_OWNED])
    return str(store.get(_OWNED).decode())


def _to_report(store: Any, failure: Failure, error: Exception, run_dir: Path | None) -> Failure | None:
    """Return the failure that this rank reports; None if another rank has reported one.

    Under Slurm the process of rank 0 holds the store where ranks see who failed first. If it ended without a report,
    the remaining ranks agree through a file in the run folder, provided that all hosts share it; without a run folder
    rank 1 reports.
    """
    if store is None:  # the ranks have not met
        return failure
    known = of_lost_peer(failure, error)
    try:
        first = int(store.add(REPORTS, 1)) == 1
    except Exception:  # the store is unreachable
        reported = lost_rank_zero(failure) if known is failure or known.of_another else known
        reports = failure.rank == 1 or reported is failure if run_dir is None else _claim(run_dir, reported)
        return reported if reports else None
    if first and run_dir is not None:
        _claim(run_dir, known)
    return known if first else None


def _claim(run_dir: Path, failure: Failure) -> bool:
    """Write the failure to a file that only one rank can create; return whether this rank reports."""
    try:
        with failure_file(run_dir).open("x", encoding="utf-8") as file:
            file.write(f"{failure.message(run_dir)}\n")
    except FileExistsError:
        return False
    except OSError:  # such as a full disk: better to report twice than not at all
        return True
    return True
