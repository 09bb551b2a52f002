"""Kills of a rank while it writes a checkpoint, with the same promise for saves that wait and those that do not."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import Run, losses_of, train_rank
from threefold.checkpoint.folder import newest
from threefold.verify.worker_pool import WorkerError, WorkerPool

KILLS = [
    ("open", "step_00000004.partial/tensors-00001.bin", 1),  # before its tensors
    ("open", "step_00000004.partial/checkpoint.json", 0),  # after all tensors
    ("os.rename", "step_00000004.partial", 0),  # at the last moment
    ("shutil.rmtree", "step_00000002.partial", 0),  # while the old one is deleted
]
"""Event, end of the path that it is about, and rank that is killed there."""


def killed_at(run: Run, folder: Path, event: str, place: str, rank: int) -> None:
    """Train two steps, go on, and kill the process of `rank` where it, or its thread that saves, does `event`."""
    import torch.distributed as dist

    beside = bool(run.config.checkpoint.async_save)

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        in_thread = threading.current_thread() is not threading.main_thread()
        if name == event and in_thread == beside and str(arguments[0]).endswith(place):
            os.kill(os.getpid(), signal.SIGKILL)

    train_rank(run.but(steps=2), folder)
    if dist.get_rank() == rank:
        sys.addaudithook(watch)
    train_rank(run, folder, True)


def require_whole_one(pool: WorkerPool, run: Run, folder: Path, event: str, place: str, rank: int) -> None:
    """Kill a run; check that its newest checkpoint is whole, and that the run resumes to the same losses."""
    run = run.but(dp=2, steps=6, set=(("checkpoint.every", 2), ("checkpoint.keep", 1), *run.set))
    pool.run(2, train_rank, run, folder / "unbroken")
    with pytest.raises(WorkerError, match="SIGKILL"):
        pool.run(2, killed_at, run, folder / "killed", event, place, rank)
    found = newest(folder / "killed")
    assert found is not None
    assert found.step == (4 if event == "shutil.rmtree" else 2)
    pool.run(2, train_rank, run, folder / "killed", True)
    assert losses_of(folder / "killed") == losses_of(folder / "unbroken")
    assert [path.name for path in (folder / "killed" / "checkpoints").iterdir()] == ["step_00000006"]
