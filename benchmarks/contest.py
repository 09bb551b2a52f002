"""Time several ways to train in turns on one machine, each in its own processes, so that other load hits all alike."""

import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Step = Callable[[int], None]
"""Function that runs step number 0, 1, 2, ... of a training run."""


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        make_step: importable function that sets up the training, called as `make_step(*args)` on each rank.
        ranks: number of processes; they share the cores.
        tree: another checkout of Threefold for its processes to import; empty for this one.
        launched: whether each process is set up as a rank by Threefold's launcher; otherwise it is a plain process.
        elapsed: whether to count elapsed time; otherwise the time that processors spend on the process, all threads
            together, on which other programs have less influence.
    """

    name: str
    make_step: Callable[..., Step]
    args: tuple[Any, ...]
    ranks: int = 1
    launched: bool = True
    tree: str = ""
    elapsed: bool = True


def contest(contestants: list[Contestant], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant, by round, with `steps` steps per round after a warm-up round."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["threefold.train.step", "threefold.models.gpt.model"])
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    with ExitStack() as stack:
        started = {contestant.name: _start(contestant, context, stack) for contestant in contestants}
        for connections in started.values():
            _turn(connections, steps)
        for number in range(rounds):
            order = contestants if number % 2 == 0 else contestants[::-1]
            for contestant in order:
                seconds[contestant.name].append(_turn(started[contestant.name], steps) / steps)
    return seconds


def ratio(faster: list[float], slower: list[float]) -> float:
    """Return the speed-up as the median over the rounds, since both times of a round met the same load."""
    return statistics.median(theirs / ours for ours, theirs in zip(faster, slower, strict=True))


def _start_other_tree(contestant: Contestant, stack: ExitStack) -> list[Connection]:
    """Start a fresh interpreter for each process, which looks for modules in the other checkout first."""
    own = replace(contestant, tree="")
    sys.path.insert(0, contestant.tree)  # a spawned process gets this list
    try:
        return _start(own, multiprocessing.get_context("spawn"), stack)
    finally:
        sys.path.remove(contestant.tree)


def _start(contestant: Contestant, context: multiprocessing.context.BaseContext, stack: ExitStack) -> list[Connection]:
    if contestant.tree:
        return _start_other_tree(contestant, stack)
    store = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store")
    connections = []
    for rank in range(contestant.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(contestant, rank, store, theirs), daemon=True)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        stack.callback(process.join)
        stack.callback(ours.close)
        connections.append(ours)
    for connection in connections:
        connection.recv()  # ready
    return connections


def _turn(connections: list[Connection], steps: int) -> float:
    """Return the seconds of the slowest rank."""
    for connection in connections:
        connection.send(steps)
    return max(connection.recv() for connection in connections)


def _serve(contestant: Contestant, rank: int, store: str, connection: Connection) -> None:
    import torch

    from threefold.host import usable_cores

    if not contestant.launched:
        torch.set_num_threads(usable_cores())
        return _answer(None, contestant, connection)
    import torch.distributed as dist

    from threefold.launch.worker import Job, RankInfo, work

    job = Job(_answer, (contestant, connection), device="cpu", run_dir=None, console_ranks=())
    info = RankInfo(rank, contestant.ranks, rank, contestant.ranks, "cpu")
    return work(job, info, dist.FileStore(store, contestant.ranks))


def _answer(_: Any, contestant: Contestant, connection: Connection) -> None:
    """Run as many steps as requested and report their duration, until there are no more requests."""
    step = contestant.make_step(*contestant.args)
    connection.send("ready")
    made = 0
    while True:
        try:
            steps = connection.recv()
        except EOFError:
            return
        gc.collect()
        clock = time.perf_counter if contestant.elapsed else time.process_time
        started = clock()
        for _ in range(steps):
            step(made)
            made += 1
        connection.send(clock() - started)
