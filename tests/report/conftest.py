"""A real short run, whose folder the tests of a module share and do not change."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.support import Run, train_rank
from threefold.verify.worker_pool import WorkerPool

STEPS = 6


@pytest.fixture(scope="session")
def recorded(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on dp 2 · tp 2, which evaluates every second and saves every third."""
    folder = tmp_path_factory.mktemp("report") / "short"
    settings = (("train.eval_every", 2), ("train.eval_batches", 1), ("checkpoint.every", 3), ("log.every", 1))
    run = small_run.but(dp=2, tp=2, steps=STEPS, set=(*small_run.set, *settings))
    pool.run(4, train_rank, run, folder, False, True)
    (folder / "config.yaml").write_text(run.config.to_yaml_as_given())
    return folder


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy the run to a folder of another name, for a test to change."""
    return lambda name: shutil.copytree(recorded, tmp_path / name)
