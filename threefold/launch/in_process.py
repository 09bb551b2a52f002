"""Run a function in this process as one rank, of an existing process group or alone, without starting a process."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from threefold.errors import UserError
from threefold.launch.device import require_gpus
from threefold.launch.environment import LaunchedRank, find_launched_rank, local_place
from threefold.launch.process import StopRequested, StopSignals
from threefold.launch.worker import Device, Job, RankInfo, Worker, never, stay_on_loopback, work

_INTERFACE = "GLOO_SOCKET_IFNAME"


def joined_rank() -> LaunchedRank | None:
    """Return this process's rank in the default process group; None if no group is initialised."""
    if "torch" not in sys.modules:  # importing torch takes seconds, and no group exists without it
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank, local_size = local_place(rank, size)
    launched = find_launched_rank()
    attempt, restarts = (launched.attempt, launched.restarts) if launched else (0, 0)
    return LaunchedRank(rank, size, local_rank, local_size, "", attempt, restarts)


def run_in_process(
    worker: Worker,
    args: tuple[Any, ...],
    world_size: int,
    *,
    device: Device = "cpu",
    own: Callable[[], AbstractContextManager[object]] = nullcontext,
    signals: StopSignals | None = None,
) -> object:
    """Call `worker(rank_info, *args)` here, as a rank of the initialised process group or the only rank of a new one.

    An existing group is left as it is; a new one lasts for the call.

    Args:
        worker: function of an importable module.
        world_size: number of ranks of the layout.
        own: makes a context, such as a lock, that rank 0 enters; a `UserError` from it is raised on all ranks.
        signals: handlers for a worker that ends when `rank_info.asked()` is not 0. A second signal ends one of several
            ranks at once, since it may be waiting for others; a single rank raises.

    Raises:
        StopRequested: a second signal came.
        UserError: the process group has another size, or there is no group and the layout has several ranks.
    """
    joined, asked = joined_rank(), (lambda: signals.received) if signals else never
    if joined is not None:
        info = RankInfo(joined.rank, joined.world_size, joined.local_rank, joined.local_world_size, device, asked)
        if joined.world_size != world_size:
            there = joined.world_size
            raise UserError(
                f"The process group has {there} ranks but the layout needs {world_size}; start {world_size}."
            )
        with ExitStack() as stack:
            _enter(stack, own, joined.rank)
            stack.enter_context(signals.noted() if signals else nullcontext())
            return worker(info, *args)
    if world_size > 1:
        raise UserError(
            f"The layout has {world_size} ranks but this is one process; start the script with `torchrun "
            f"--nproc-per-node {world_size}`, or call it in threefold.run(fn, ranks={world_size})."
        )
    if device == "cuda":
        require_gpus(1)
    import torch.distributed as dist

    with own(), _alone(), signals.passed_to(_raise_second) if signals else nullcontext():
        return work(Job(worker, args, device, None, (0,)), RankInfo(0, 1, 0, 1, device, asked), dist.HashStore())


def _raise_second(number: int, again: bool) -> None:
    if again:
        raise StopRequested(number, again)


def _enter(stack: ExitStack, own: Callable[[], AbstractContextManager[object]], rank: int) -> None:
    import torch.distributed as dist

    refusal = [""]
    if rank == 0:
        try:
            stack.enter_context(own())
        except UserError as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0]:
        raise UserError(refusal[0])


@contextmanager
def _alone() -> Iterator[None]:
    """Clean up on exit: destroy the process group, and restore the gloo setting that a single rank needs."""
    import torch.distributed as dist

    before = os.environ.get(_INTERFACE)
    stay_on_loopback()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if before is None:
            os.environ.pop(_INTERFACE, None)
        else:
            os.environ[_INTERFACE] = before
