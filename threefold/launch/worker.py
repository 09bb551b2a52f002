"""Set up a rank (device, threads, process group), then call the worker function."""

import math
import os
import re
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from threefold.comm.heartbeat import Activity, Heartbeat, RunSection, wait_code
from threefold.doors import hook, needed
from threefold.errors import UserError
from threefold.host import usable_cores
from threefold.launch.device import Backend, gpu_count
from threefold.launch.environment import chosen_threads
from threefold.launch.output import log_file, logged, logged_and_shown

if TYPE_CHECKING:
    from torch.distributed import Store

Device = Literal["cpu", "cuda"]

_LONGEST_COLLECTIVE: Final = timedelta(days=1)
"""Longest wait of a rank that makes progress, such as one that writes a large checkpoint to a slow disk; heartbeats
find one that makes no progress. (Shared-memory waits count milliseconds in 32 bits.)"""


def never() -> int:
    """Return 0: no signal came."""
    return 0


@dataclass(frozen=True)
class RankInfo:
    """A worker's rank and environment, passed as its first argument.

    Attributes:
        local_rank: rank on this host; on CUDA also the GPU index (over gloo, several ranks may share a GPU).
        asked: returns the number of the signal that stops this rank, 0 for none.
        heartbeat: records what the rank does; None where nobody reads it.
        backend: "auto" is NCCL between GPUs and gloo between CPUs, "gloo" is gloo everywhere.
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
"""Function of an importable module, called as `worker(rank_info, *args)` on every rank."""


@dataclass(frozen=True)
class Job:
    """Worker that all ranks run, its arguments, and where the ranks' output goes.

    Attributes:
        run_dir: folder whose logs/rank_*.log get the output; None does not redirect it.
        prints_traceback: whether a rank without a log prints the traceback of its exception; False if the caller raises
            it.
        timeout: seconds without progress after which a rank counts as hung; 0 for never.
        debug_rank: rank that has the terminal, for a debugger. With one, no rank counts as hung.
    """

    worker: Worker
    args: tuple[Any, ...]
    device: Device = "cpu"
    run_dir: Path | None = None
    console_ranks: tuple[int, ...] = (0,)
    prints_traceback: bool = True
    timeout: float = 0.0
    backend: Backend = "auto"
    debug_rank: int | None = None

    @property
    def over_nccl(self) -> bool:
        """True if collectives run on GPUs over NCCL, outside the training thread."""
        return self.device == "cuda" and self.backend == "auto"

    def output_of(self, rank: int) -> AbstractContextManager[None]:
        """Redirect the output of `rank` to its log, unless there is no run folder or the rank has the terminal."""
        if rank == self.debug_rank:
            return nullcontext()
        if self.run_dir is None:  # a single rank streams, such as the text that it generates
            whole_lines = hook("whole_lines") if len(self.console_ranks) > 1 else None
            return nullcontext() if whole_lines is None else whole_lines()
        log = log_file(self.run_dir, rank)
        if rank not in self.console_ranks:
            return logged(log)
        return logged_and_shown(log, f"[rank {rank}] " if len(self.console_ranks) > 1 else "")


def work(job: Job, info: RankInfo, store: "Store") -> object:
    """Run the job as one rank (device, process group, worker, clean-up) and return the worker's result."""
    import torch.distributed as dist

    watched = job.timeout if hook("watch_local") else 0.0  # without that room, torch's own limits end a wait
    join(info, store, watched if job.debug_rank is None else math.inf)
    result = job.worker(info, *job.args)
    if info.heartbeat is not None:
        info.heartbeat.section(RunSection.END)
    if dist.is_initialized():  # a user's function may have left it
        dist.destroy_process_group()
    return result


def join(info: RankInfo, store: "Store", timeout: float = 0.0) -> None:
    """Set up the device and threads of a rank and join the process group; return when all ranks have joined."""
    import torch
    import torch.distributed as dist

    if info.device == "cuda":
        torch.cuda.set_device(info.local_rank if info.backend == "auto" else info.local_rank % gpu_count())
    else:
        torch.set_num_threads(threads_per_rank(info.local_world_size))
    backend, longest = "gloo", _LONGEST_COLLECTIVE if timeout else None  # None is torch's default
    if info.device == "cuda" and info.backend == "auto":
        backend = "cpu:gloo,cuda:nccl"
        if timeout:  # an NCCL collective may wait so long: the training thread is not seen to wait in one
            longest = timedelta(seconds=min(4 * timeout, _LONGEST_COLLECTIVE.total_seconds()))
    elif info.device == "cuda":
        backend = staged_backend()
    heartbeat = info.heartbeat or Heartbeat()
    heartbeat.activity(Activity.JOIN)
    with heartbeat.waiting(wait_code("gather", heartbeat.axis("world", range(info.world_size)))):
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=longest)
        wait_for_all()


def staged_backend() -> str:
    """Register the backend of `torch.distributed` in which gloo also takes tensors of a GPU, and return its name."""
    return str(needed("register_staged", "parallel.backend gloo on GPUs", "cpu")())


def stay_on_loopback() -> None:
    """Make gloo listen only on the loopback interface, in all process groups of this process; for ranks of one host.

    By default gloo listens on the address that the host name resolves to, which other hosts may reach. torch 2.13
    passes no options to gloo, so only the environment variable sets this.
    """
    listen_on_loopback().close()  # gloo's own error is a traceback
    loopback = [name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens at a free port of this host's loopback address, of IPv6 if there is no other.

    Raises a `UserError` if nothing can connect there, as where the interface is down.
    """
    failures = []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        listener = None
        try:
            listener = socket.create_server((address, 0), family=family, backlog=1024)
            with socket.create_connection(listener.getsockname()[:2], 5.0):
                listener.accept()[0].close()
            return listener
        except OSError as error:
            failures.append(f"{address}: {(os.strerror(error.errno) if error.errno else str(error)).lower()}")
            if listener is not None:
                listener.close()
    raise UserError(
        f"The ranks of a run meet on the loopback interface of their host, where nothing can connect "
        f"({'; '.join(failures)}); take the interface up with `ip link set lo up`."
    )


def wait_for_all() -> None:
    """Wait until every rank has joined; one that ended earlier would look lost to a rank that still connects."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))  # on the CPU, which all backends support, unlike a barrier


def threads_per_rank(local_world_size: int) -> int:
    """Return the number of threads per rank: the user's choice, or else its part of this host's cores."""
    return chosen_threads() or max(1, usable_cores() // local_world_size)
