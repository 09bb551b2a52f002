"""One slow rank of real processes is named, and none where no rank is slow, on a machine that has other work, too."""

import contextlib
import io
import mmap
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launch.callback_faults import Slow
from tests.train.support import Run, train
from threefold.resilience.heartbeat import PAGE_BYTES, PageHeartbeat
from threefold.resilience.rank_state import read
from threefold.verify.worker_pool import WorkerPool

LAYOUTS = ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 2})


def named(run: Run, folder: Path, pages: Path, slow: int, seconds: float) -> set[int]:
    """Train as a rank of the pool, whose ranks share their pages in a file; the ranks that the first one names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with pages.open("r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), size * PAGE_BYTES))
    parts = [memory[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(size)]
    heartbeat = PageHeartbeat(parts[rank], lambda: [read(part) for part in parts])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(run.config, folder, False, callbacks=[Slow(slow, seconds)], heartbeat=heartbeat)
    return {int(found) for found in re.findall(r"rank (\d+) computes", printed.getvalue())}


def first_rank_names(pool: WorkerPool, run: Run, folder: Path, slow: int, seconds: float) -> set[int]:
    folder.mkdir()
    pages = folder / "pages"
    pages.write_bytes(bytes(run.world_size * PAGE_BYTES))
    return pool.run(run.world_size, named, run, folder / "run", pages, slow, seconds)[0]


@pytest.fixture
def other_work() -> Iterator[None]:
    """Two processes that compute all the while."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(20))
def test_the_slow_rank_is_named(pool: WorkerPool, small_run: Run, tmp_path: Path, seed: int) -> None:
    run = small_run.but(steps=24, **LAYOUTS[seed % len(LAYOUTS)])
    slow = random.Random(seed).randrange(run.world_size)
    assert first_rank_names(pool, run, tmp_path / "run", slow, 0.25) == {slow}


@pytest.mark.sweep
@pytest.mark.usefixtures("other_work")
@pytest.mark.parametrize("seed", range(20))
def test_no_rank_is_named_on_a_busy_machine(pool: WorkerPool, small_run: Run, tmp_path: Path, seed: int) -> None:
    run = small_run.but(steps=24, **[*LAYOUTS, {"pp": 3}][seed % 6])
    assert first_rank_names(pool, run, tmp_path / "run", -1, 0.0) == set()
