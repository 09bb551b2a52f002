"""Run a function on all ranks: on new processes of this host, as a rank of torchrun or Slurm, or in this process."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from threefold.comm.heartbeat import Heartbeat, wait_code
from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.launch import failure as failures
from threefold.launch.device import require_gpus
from threefold.launch.environment import LaunchedRank, find_launched_rank, local_place, meet
from threefold.launch.failure import Failure, RankFailed, claims_report, is_first_to_report
from threefold.launch.local import RunLock, spawn, write_traceback
from threefold.launch.output import failure_file
from threefold.launch.process import StopSignals, raise_on_second
from threefold.launch.worker import Device, Job, RankInfo, Worker, never, stay_on_loopback, work

_INTERFACE = "GLOO_SOCKET_IFNAME"


def run(
    worker: Worker,
    args: tuple[Any, ...],
    world_size: int,
    *,
    lock: RunLock = nullcontext,
    signals: StopSignals | None = None,
    again: Callable[[Failure], Any] | None = None,
    **options: Any,
) -> object:
    """Call `worker(rank_info, *args)` on every rank with `torch.distributed` initialised, and wait for the end.

    Under torchrun or Slurm's srun this process is one rank; otherwise the ranks are started here.

    The arguments are as in `spawn`, but a launcher restarts its ranks itself, without `again`. A `UserError` of `lock`
    is raised for all ranks. Without `signals`, signals end the processes.

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
        return spawn(worker, args, world_size, lock=lock, signals=signals, again=again, **options)
    if launched.world_size != world_size:
        raise UserError(
            f"The launcher started {launched.world_size} ranks but the layout needs {world_size}; start {world_size}."
        )
    job = Job(worker, args, **options)
    if job.device == "cuda":
        require_gpus(launched.local_world_size, job.backend)
    info = _info(launched, job, signals)
    store: Any = None

    def shared(refusal: str) -> str:
        if launched.rank == 0:
            if job.run_dir is not None and not refusal:
                with suppress(OSError):  # no such file or folder yet
                    failure_file(job.run_dir).unlink()
            store.set("owned", refusal)
        store.wait(["owned"])
        return str(store.get("owned").decode())

    try:
        store = meet(launched, job.timeout)
        with ExitStack() as stack:
            watched = job.timeout and launched.world_size > 1
            if watched and (watch := call_hook("watch_launched", job, launched, store)):
                info = replace(info, heartbeat=stack.enter_context(watch))
            heartbeat = info.heartbeat or Heartbeat()
            with heartbeat.waiting(wait_code("gather", heartbeat.axis("world", range(launched.world_size)))):
                refusal = _entered(stack, lock, launched.rank, shared)
            if not refusal:
                stack.enter_context(job.output_of(launched.rank))
                stack.enter_context(signals.noted() if signals else nullcontext())
                return work(job, info, store)
    except Exception as error:
        write_traceback(job, launched.rank, error)
        failure = _to_report(store, failures.from_exception(launched.rank, error), error, job.run_dir)
        if failure is not None:
            raise RankFailed(failure.message(job.run_dir)) from error
        sys.exit(1)
    raise UserError(refusal)


def joined_rank() -> LaunchedRank | None:
    """Return this process's rank in the default process group; None if no group is initialised."""
    if "torch" not in sys.modules:  # importing torch takes seconds, and no group exists without it
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    launched = find_launched_rank()
    attempt, restarts = (launched.attempt, launched.restarts) if launched else (0, 0)
    return LaunchedRank(rank, size, *local_place(rank, size), attempt, restarts)


def run_in_process(
    worker: Worker,
    args: tuple[Any, ...],
    world_size: int,
    *,
    device: Device = "cpu",
    lock: RunLock = nullcontext,
    signals: StopSignals | None = None,
) -> object:
    """Call `worker(rank_info, *args)` here, as a rank of the initialised process group or the only rank of a new one.

    An existing group is left as it is; a new one lasts for the call. Rank 0 enters `lock`; a `UserError` of it is
    raised on all ranks. A second signal ends one of several ranks at once, since it may be waiting for others; a single
    rank raises `StopRequested`.
    """
    joined, job = joined_rank(), Job(worker, args, device)
    if joined is not None:
        if (there := joined.world_size) != world_size:
            raise UserError(
                f"The process group has {there} ranks but the layout needs {world_size}; start {world_size}."
            )
        import torch.distributed as dist

        def shared(refusal: str) -> str:
            texts = [refusal]
            dist.broadcast_object_list(texts, src=0)
            return texts[0]

        with ExitStack() as stack:
            if refusal := _entered(stack, lock, joined.rank, shared):
                raise UserError(refusal)
            stack.enter_context(signals.noted() if signals else nullcontext())
            return worker(_info(joined, job, signals), *args)
    if world_size > 1:
        raise UserError(
            f"The layout has {world_size} ranks but this is one process; start the script with `torchrun "
            f"--nproc-per-node {world_size}`, or call it in threefold.run(fn, ranks={world_size})."
        )
    if device == "cuda":
        require_gpus(1)
    import torch.distributed as dist

    info = _info(LaunchedRank(0, 1, 0, 1), job, signals)
    before = os.environ.get(_INTERFACE)
    with lock(), signals.passed_to(raise_on_second) if signals else nullcontext():
        stay_on_loopback()
        try:
            return work(job, info, dist.HashStore())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.pop(_INTERFACE, None)
            if before is not None:
                os.environ[_INTERFACE] = before


def _info(rank: LaunchedRank, job: Job, signals: StopSignals | None) -> RankInfo:
    asked = partial(getattr, signals, "received") if signals else never
    place = (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size)
    return RankInfo(*place, job.device, asked, backend=job.backend)


def _entered(stack: ExitStack, lock: RunLock, rank: int, shared: Callable[[str], str]) -> str:
    """Enter `lock` on rank 0; return the message of its `UserError` on every rank, or "" if there was none."""
    refusal = ""
    if rank == 0:
        try:
            stack.enter_context(lock())
        except UserError as error:
            refusal = str(error)
    return shared(refusal)


def _to_report(store: Any, failure: Failure, error: Exception, run_dir: Path | None) -> Failure | None:
    """Return the failure that this rank reports; None if another rank has reported one.

    Under Slurm the process of rank 0 holds the store where ranks see who failed first. If it ended without a report,
    the remaining ranks agree through a file in the run folder, provided that all hosts share it; without a run folder
    rank 1 reports.
    """
    if store is None:  # the ranks have not met
        return failure
    known = failures.of_lost_peer(failure, error)
    try:
        first = is_first_to_report(store)
    except Exception:  # the store is unreachable
        reported = failures.lost_rank_zero(failure) if known is failure or known.of_another else known
        reports = failure.rank == 1 or reported is failure if run_dir is None else claims_report(run_dir, reported)
        return reported if reports else None
    if first and run_dir is not None:
        claims_report(run_dir, known)
    return known if first else None
