"""Set-up of a rank: device, threads and process group, then the worker function."""

import math
import os
import re
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from threefold.comm.heartbeat import Activity, Heartbeat, RunSection, wait_code
from threefold.host import usable_cores
from threefold.launch.device import Backend, gpu_count
from threefold.launch.output import log_file, logged, logged_and_shown

if TYPE_CHECKING:
    from torch.distributed import Store

Device = Literal["cpu", "cuda"]

_LONGEST_WAIT: Final = timedelta(days=1)
"""For a rank that makes progress, such as one that writes a large checkpoint to a slow disk; one that makes none is
found by the heartbeats. (What waits in shared memory counts milliseconds in 32 bits.)"""
_NCCL: Final = "cpu:gloo,cuda:nccl"
_WAITS_ON_GPU: Final = 4
"""How many timeouts a collective of NCCL may wait, in which the thread that trains is not seen to wait."""


def never() -> int:
    """No signal."""
    return 0


@dataclass(frozen=True)
class RankInfo:
    """The rank of a worker, its first argument.

    Attributes:
        rank: 0 to `world_size` - 1.
        local_rank: 0 to `local_world_size` - 1 on this host; on CUDA also the index of its GPU, which over gloo several
            share in turn.
        device: CPU or CUDA.
        asked: returns the number of the signal that stops this rank, 0 for none.
        heartbeat: where it notes what it does; None where nobody reads it.
        backend: of the collectives: NCCL between GPUs and gloo between CPUs, or gloo everywhere.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: Device
    asked: Callable[[], int] = never
    heartbeat: Heartbeat | None = None
    backend: Backend = "auto"


Worker = Callable[..., object]
"""A function of an importable module, called as `worker(rank_info, *args)` on every rank."""


@dataclass(frozen=True)
class Job:
    """What all ranks run, and where their output goes.

    Attributes:
        stops: whether the worker stops when `RankInfo.asked` returns a signal; otherwise a signal ends its process.
        prints_traceback: whether a rank without a log prints the traceback of its exception; not where its caller
            raises that.
        timeout: seconds after which a rank is taken to hang; 0 for none.
        backend: as of `RankInfo`.
        debug_rank: the rank that has the terminal, for a debugger; None for none. With one, no rank is taken to hang.
    """

    worker: Worker
    args: tuple[Any, ...]
    device: Device
    run_dir: Path | None
    console_ranks: tuple[int, ...]
    stops: bool = False
    prints_traceback: bool = True
    timeout: float = 0.0
    backend: Backend = "auto"
    debug_rank: int | None = None

    @property
    def over_nccl(self) -> bool:
        """Whether collectives run on GPUs, beside the thread that trains."""
        return self.device == "cuda" and self.backend == "auto"

    def beating(self, heartbeat: Heartbeat, rank: int) -> AbstractContextManager[None]:
        """Beats for `rank`; on a GPU it writes what NCCL knows when a rank does not answer."""
        from threefold.launch.hang_watch import beating, keep_records, write_records

        if not self.over_nccl:
            return beating(heartbeat)
        keep_records(self.run_dir)
        return beating(heartbeat, partial(write_records, self.run_dir, rank))

    def output_of(self, rank: int) -> AbstractContextManager[None]:
        """Redirects the output of `rank` to its log; does nothing without a run folder, nor for the rank that has the
        terminal."""
        if self.run_dir is None or rank == self.debug_rank:
            return nullcontext()
        log = log_file(self.run_dir, rank)
        if rank not in self.console_ranks:
            return logged(log)
        return logged_and_shown(log, f"[rank {rank}] " if len(self.console_ranks) > 1 else "")


class NextAttempt(NamedTuple):
    """The arguments of the worker in an attempt that follows a failed one, and the number of ranks."""

    args: tuple[Any, ...]
    world_size: int


def work(job: Job, info: RankInfo, store: "Store") -> object:
    """Run the job as one rank: set up the device, join the process group, call the worker, leave the group.

    Returns the worker's result.
    """
    import torch.distributed as dist

    join(info, store, job.timeout if job.debug_rank is None else math.inf)
    result = job.worker(info, *job.args)
    if info.heartbeat is not None:
        info.heartbeat.section(RunSection.END)
    if dist.is_initialized():  # a user's function may have left it
        dist.destroy_process_group()
    return result


def join(info: RankInfo, store: "Store", timeout: float = 0.0) -> None:
    """Set up the device and the threads of a rank, and join the process group; returns when all ranks have.

    Args:
        store: of the rendezvous.
        timeout: as of `Job`.
    """
    import torch
    import torch.distributed as dist

    if info.device == "cuda":
        torch.cuda.set_device(info.local_rank if info.backend == "auto" else info.local_rank % gpu_count())
    else:
        torch.set_num_threads(threads_per_rank(info.local_world_size))
    backend = _backend_of(info)
    heartbeat = info.heartbeat or Heartbeat()
    heartbeat.activity(Activity.JOIN)
    with heartbeat.waiting(wait_code("gather", heartbeat.axis("world", range(info.world_size)))):
        longest = _group_timeout(backend, timeout)
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=longest)
        wait_for_all()


def _backend_of(info: RankInfo) -> str:
    """The name by which `torch.distributed` knows the backend of a rank."""
    if info.device == "cpu":
        return "gloo"
    if info.backend == "auto":
        return _NCCL
    from threefold.comm.staged_group import BACKEND, register_backend

    register_backend()
    return BACKEND


def _group_timeout(backend: str, timeout: float) -> timedelta | None:
    """How long collectives of a process group wait at most where a rank without progress has `timeout` seconds (0: any
    number); None for as long as torch lets them."""
    if not timeout:
        return None
    on_gpu = timedelta(seconds=min(_WAITS_ON_GPU * timeout, _LONGEST_WAIT.total_seconds()))
    return on_gpu if backend == _NCCL else _LONGEST_WAIT


def stay_on_loopback() -> None:
    """Have gloo listen on the loopback interface only, for all process groups of this process.

    For ranks of one host. Otherwise gloo listens on the address that the host name resolves to, which other hosts may
    reach. Only the environment variable sets this: torch 2.13 passes no options to gloo.
    """
    loopback = [name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def shorten_name_lookups() -> None:
    """Have the look-ups of names in this process, which has made none yet, ask again after one second and give up after
    two.

    For ranks of one host. Each asks for the name of 127.0.0.1 when it connects to the store: without a network that
    takes 10 s, and of 64 ranks that ask at once some wait 5 s for an answer that was lost. Only the environment
    variable sets this: torch 2.13 has no option to leave the name.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


def wait_for_all() -> None:
    """Wait until every rank has joined, as a rank that ended early would look lost to one that still connects."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))  # on the CPU, which all backends support, unlike a barrier


def threads_per_rank(local_world_size: int) -> int:
    """Threads of a rank when the ranks of this host divide its cores."""
    return max(1, usable_cores() // local_world_size)
