"""Starts runs of the small GPT as forks of this process, which has imported torch already: a run takes a second."""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.parity_gpt.run import parse
from benchmarks.parity_gpt.train import main


class RunFailed(Exception):
    """A rank ended with an error, or did not end."""


def launch(arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 120) -> str:
    """Run the small GPT with one process per rank; return what they print.

    Raises:
        RunFailed: a rank failed, or time ran out; with its last lines.
    """
    options = parse(list(arguments))
    world = options.dp * options.tp * options.pp * options.cp
    torch.set_num_threads(1)  # a fork of a process with threads of its own can hang
    with tempfile.TemporaryDirectory() as folder:
        children = {_fork(rank, world, arguments, environment, Path(folder)): rank for rank in range(world)}
        failed = _wait(children, timeout)
        printed = "".join((Path(folder) / f"rank-{rank}.txt").read_text() for rank in range(world))
        if failed is not None:
            raise RunFailed(f"rank {failed}:\n{(Path(folder) / f'rank-{failed}.txt').read_text()[-2500:]}")
        return printed


def _wait(children: dict[int, int], timeout: float) -> int | None:
    """Wait for all children; return the rank that failed first, after ending the others."""
    deadline = time.monotonic() + timeout
    waiting, failed = dict(children), None
    while waiting:
        for child in list(waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                rank = waiting.pop(child)
                failed = rank if status and failed is None else failed
        if waiting and (failed is not None or time.monotonic() > deadline):
            failed = next(iter(waiting.values())) if failed is None else failed
            for child in waiting:
                os.kill(child, 9)
            deadline = float("inf")
        time.sleep(0.01)
    return failed


def _fork(rank: int, world: int, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        file = os.open(folder / f"rank-{rank}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        if world > 1:
            store = dist.FileStore(str(folder / "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        main(list(arguments))
        code = 0
    except SystemExit as ending:
        code = 0 if ending.code in (None, 0) else 1
        if code:
            print(ending.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
