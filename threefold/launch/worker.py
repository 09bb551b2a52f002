"""Set-up of a rank: device, threads and process group, then the worker function."""

import os
import re
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from threefold.host import usable_cores
from threefold.launch.environment import LaunchedRank
from threefold.launch.output import log_file, logged, logged_and_shown

if TYPE_CHECKING:
    from torch.distributed import Store

Device = Literal["cpu", "cuda"]


def never() -> int:
    """No signal."""
    return 0


@dataclass(frozen=True)
class RankInfo:
    """The rank of a worker, its first argument.

    Attributes:
        rank: 0 to `world_size` - 1.
        local_rank: 0 to `local_world_size` - 1 on this host; on CUDA also the index of its GPU.
        device: CPU or CUDA.
        asked: returns the number of the signal that stops this rank, 0 for none.
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
    """What all ranks run, and where their output goes.

    Attributes:
        stops: whether the worker stops when `RankInfo.asked` returns a signal; otherwise a signal ends its process.
        prints_traceback: whether a rank without a log prints the traceback of its exception; not where its caller
            raises that.
    """

    worker: Worker
    args: tuple[Any, ...]
    device: Device
    run_dir: Path | None
    console_ranks: tuple[int, ...]
    stops: bool = False
    prints_traceback: bool = True

    def output_of(self, rank: int) -> AbstractContextManager[None]:
        """Redirects the output of `rank` to its log; without a run folder, does nothing."""
        if self.run_dir is None:
            return nullcontext()
        log = log_file(self.run_dir, rank)
        if rank not in self.console_ranks:
            return logged(log)
        return logged_and_shown(log, f"[rank {rank}] " if len(self.console_ranks) > 1 else "")


def work(job: Job, info: RankInfo, store: "Store") -> object:
    """Run the job as one rank: set up the device, join the process group, call the worker, leave the group.

    Returns the worker's result.
    """
    import torch.distributed as dist

    join(info, store)
    result = job.worker(info, *job.args)
    if dist.is_initialized():  # a user's function may have left it
        dist.destroy_process_group()
    return result


def join(info: RankInfo, store: "Store") -> None:
    """Set up the device and the threads of a rank, and join the process group; returns when all ranks have."""
    import torch
    import torch.distributed as dist

    if info.device == "cuda":
        torch.cuda.set_device(info.local_rank)
    else:
        torch.set_num_threads(threads_per_rank(info.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if info.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size)
    wait_for_all()


def meet(launched: LaunchedRank) -> "Store":
    """The rendezvous store of this attempt; a launcher may keep the same store when it restarts the ranks."""
    import torch.distributed as dist

    store, _, _ = next(iter(dist.rendezvous(launched.rendezvous)))
    return dist.PrefixStore(f"threefold/{launched.attempt}", store)


def stay_on_loopback() -> None:
    """Have gloo listen on the loopback interface only, for all process groups of this process.

    For ranks of one host. Otherwise gloo listens on the address that the host name resolves to, which other hosts may
    reach. Only the environment variable sets this: torch 2.13 passes no options to gloo.
    """
    loopback = [name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def wait_for_all() -> None:
    """Wait until every rank has joined, as a rank that ended early would look lost to one that still connects."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))  # on the CPU, which both backends support, unlike a barrier


def threads_per_rank(local_world_size: int) -> int:
    """Threads of a rank when the ranks of this host divide its cores."""
    return max(1, usable_cores() // local_world_size)
