"""Run a function as the ranks of one world: on processes of this host, or as the rank a launcher started here."""

import sys
from pathlib import Path
from typing import Any

from threefold.errors import UserError
from threefold.launch.device import require_gpus
from threefold.launch.environment import Place, find_place
from threefold.launch.failure import Failure, RankFailed, from_exception
from threefold.launch.local import StartMethod, run_local, write_traceback
from threefold.launch.process import require_room
from threefold.launch.worker import Device, Job, RankInfo, Worker, work


def run(
    worker: Worker,
    args: tuple[Any, ...],
    world_size: int,
    *,
    device: Device = "cpu",
    run_dir: Path | None = None,
    console_ranks: tuple[int, ...] = (0,),
) -> None:
    """Call `worker(rank_info, *args)` on every rank with `torch.distributed` initialised, and wait for the end.

    Under torchrun or Slurm's srun this process is one rank of the world; otherwise the ranks are started here.

    Args:
        worker: a function of an importable module.
        world_size: ranks of the layout.
        run_dir: folder whose logs/rank_*.log get what the ranks print; None leaves their output alone.
        console_ranks: ranks whose output is shown on the console too.

    Raises:
        UserError: the launcher's world is another one, there are too few GPUs, or a rank started here raised it.
        RankFailed: a rank failed; all have been ended.
        SystemExit: this is a launcher's rank and failed after another one, which says so.
    """
    place = find_place()
    if place is None:
        spawn(worker, args, world_size, device=device, run_dir=run_dir, console_ranks=console_ranks)
        return
    if place.world_size != world_size:
        raise UserError(
            f"The launcher started {place.world_size} ranks but the layout needs {world_size}; start {world_size}."
        )
    _run_here(Job(worker, args, device, run_dir, console_ranks), place)


def spawn(
    worker: Worker,
    args: tuple[Any, ...],
    world_size: int,
    *,
    device: Device = "cpu",
    run_dir: Path | None = None,
    console_ranks: tuple[int, ...] = (0,),
    start_method: StartMethod | None = None,
) -> None:
    """As `run`, always on processes of this host.

    Args:
        start_method: "fork", the default on the CPU, needs a process that ran no parallel torch operation yet; "spawn",
            the default on CUDA, needs a main module that can be imported.
    """
    require_room(world_size)
    if device == "cuda":
        require_gpus(world_size)
    job = Job(worker, args, device, run_dir, console_ranks)
    run_local(job, world_size, start_method or ("spawn" if device == "cuda" else "fork"))


def _run_here(job: Job, place: Place) -> None:
    """Be the rank that a launcher started."""
    if job.device == "cuda":
        require_gpus(place.local_world_size)
    info = RankInfo(place.rank, place.world_size, place.local_rank, place.local_world_size, job.device)
    store = None
    try:
        with job.output_of(place.rank):
            import torch.distributed as dist

            store, _, _ = next(iter(dist.rendezvous(place.rendezvous)))
            work(job, info, dist.PrefixStore("threefold", store))
    except Exception as error:
        write_traceback(job, place.rank, error)
        failure = from_exception(place.rank, error)
        if _is_first(store, failure):
            raise RankFailed(failure.message(job.run_dir)) from error
        sys.exit(1)


def _is_first(store: Any, failure: Failure) -> bool:
    """Whether no other rank has said yet that it failed."""
    try:
        return int(store.add("threefold/failures", 1)) == 1
    except Exception:  # the store is gone, or was never there
        return True
