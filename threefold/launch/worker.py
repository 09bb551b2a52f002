"""What one rank does around the work: devices, threads, the process group."""

import os
import re
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from threefold.launch.output import log_file, logged, logged_and_shown

if TYPE_CHECKING:
    from torch.distributed import Store

Device = Literal["cpu", "cuda"]


def never() -> int:
    """No signal."""
    return 0


@dataclass(frozen=True)
class RankInfo:
    """Which rank this is: handed to every worker.

    Attributes:
        rank: 0 to `world_size` - 1.
        local_rank: 0 to `local_world_size` - 1 on this host; on CUDA also the number of its GPU.
        device: what it computes on.
        asked: the number of the signal that asked this rank to end the run in order, 0 for none.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: Device
    asked: Callable[[], int] = never


Worker = Callable[..., object]
"""A function of an importable module, called as `worker(rank_info, *args)` on every rank."""


@dataclass(frozen=True)
class Job:
    """What all ranks do, and where they say so.

    Attributes:
        stops: whether the worker ends in order when it is asked to; otherwise a signal ends its process.
    """

    worker: Worker
    args: tuple[Any, ...]
    device: Device
    run_dir: Path | None
    console_ranks: tuple[int, ...]
    stops: bool = False

    def output_of(self, rank: int) -> AbstractContextManager[None]:
        """Where the streams of `rank` go: without a run folder, where they went before."""
        if self.run_dir is None:
            return nullcontext()
        log = log_file(self.run_dir, rank)
        if rank not in self.console_ranks:
            return logged(log)
        return logged_and_shown(log, f"[rank {rank}] " if len(self.console_ranks) > 1 else "")


def work(job: Job, info: RankInfo, store: "Store") -> object:
    """Do the job as one rank: set up the device, join the process group, call the worker, leave the group.

    Returns what the worker returns.
    """
    import torch
    import torch.distributed as dist

    if job.device == "cuda":
        torch.cuda.set_device(info.local_rank)
    else:
        torch.set_num_threads(threads_per_rank(info.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size)
    wait_for_all()
    result = job.worker(info, *job.args)
    dist.destroy_process_group()
    return result


def stay_on_loopback() -> None:
    """Have gloo, for all groups that this process will make, listen on the loopback interface alone.

    For ranks of one host. Without it gloo listens on the address that the host's name resolves to, which others may
    reach. The variable is the only way to tell it: torch 2.13 passes no options on to gloo.
    """
    loopback = [name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def wait_for_all() -> None:
    """Wait until every rank has joined: one that leaves early would be taken for lost by one that still connects."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))  # on the CPU, where every backend here works, unlike a barrier


def threads_per_rank(local_world_size: int) -> int:
    """Threads of one rank when the ranks of this host share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)
