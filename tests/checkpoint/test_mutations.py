"""Tests of the tests of resuming: each known mistake, put back into the second half of a run, shows in its losses."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.mistakes import Patch, patched
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, same, train_rank
from threefold.checkpoint.manifest import Checkpoint
from threefold.data.loader import Loader
from threefold.launch.worker_pool import WorkerPool
from threefold.train import run as entry_point
from threefold.train import step as step_module
from threefold.train import step_batch
from threefold.train.step import Engine

HALF, WHOLE, BATCH = 3, 6, 48


def next_batch_is_the_last_one_again() -> list[Patch]:
    batch = Loader.batch
    return [(Loader, "batch", lambda self, step, *_: batch(self, step - 1))]


def samples_from_the_start() -> list[Patch]:
    batch = Loader.batch
    return [(Loader, "batch", lambda self, step, *_: batch(self, step - HALF))]


def order_of_the_first_epoch_again() -> list[Patch]:
    """The second pass over the data in the order of the first."""

    def read(self: Loader, step: int, keyed: bool = False) -> Any:
        counters = (step * BATCH + self.share.rows) % len(self.train)
        return self._make_batch(self.train, self.train.ordered(counters, self.seed), None)

    return [(Loader, "_read_train", read)]


def epoch_starts_with_the_resumed_run() -> list[Patch]:
    """What was left of the first pass is skipped."""

    def read(self: Loader, step: int, keyed: bool = False) -> Any:
        counters = len(self.train) + (step - HALF) * BATCH + self.share.rows
        return self._make_batch(self.train, self.train.ordered(counters, self.seed), None)

    return [(Loader, "_read_train", read)]


def position_counted_in_samples_of_a_replica() -> list[Patch]:
    """Of the two before, and taken for that of the three now."""

    def read(self: Loader, step: int, keyed: bool = False) -> Any:
        counters = HALF * BATCH // 2 * 3 + (step - HALF) * BATCH + self.share.rows
        return self._make_batch(self.train, self.train.ordered(counters, self.seed), None)

    return [(Loader, "_read_train", read)]


def _restored_without(*names: str) -> list[Patch]:
    restore = entry_point.restore_engine

    def restored(engine: Engine, checkpoint: Checkpoint) -> None:
        restore(engine, checkpoint)
        for _, name, value in engine.optimizer.states():
            if name in names:
                value.zero_()

    return [(entry_point, "restore_engine", restored)]


def adam_counts_its_updates_anew() -> list[Patch]:
    return _restored_without("step")


def moments_of_adam_forgotten() -> list[Patch]:
    return _restored_without("exp_avg", "exp_avg_sq")


def warm_up_and_decay_start_anew() -> list[Patch]:
    rate = step_module.learning_rate
    return [(step_module, "learning_rate", lambda step, config: rate(step - HALF, config))]


def dropout_masks_start_anew() -> list[Patch]:
    keys = step_batch.sample_keys
    return [(step_batch, "sample_keys", lambda seed, step, rows: keys(seed, step - HALF, rows))]


def masters_from_the_narrow_weights() -> list[Patch]:
    restore = entry_point.restore_engine

    def restored(engine: Engine, checkpoint: Checkpoint) -> None:
        restore(engine, checkpoint)
        for entry in engine.optimizer.entries:
            entry.master.detach().copy_(entry.leaf.detach())

    return [(entry_point, "restore_engine", restored)]


def resumed(mistake: Callable[[], list[Patch]], run: Run, folder: Path) -> None:
    with patched(mistake()):
        train_rank(run, folder, True)


@pytest.fixture(scope="module")
def run(small_run: Run) -> Run:
    """It begins its second pass over the data one step before the checkpoint."""
    return small_run.but(dtype="fp64", set=(("data.split", "10,90"), ("train.global_batch_size", BATCH)))


@pytest.fixture(scope="module")
def unbroken(pool: WorkerPool, run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the run in one piece."""
    folder = tmp_path_factory.mktemp("unbroken")
    pool.run(1, train_rank, run.but(steps=WHOLE), folder)
    return losses_of(folder)


@pytest.fixture(scope="module")
def half(pool: WorkerPool, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of its first half, on two replicas."""
    folder = tmp_path_factory.mktemp("half") / "run"
    pool.run(2, train_rank, run.but(dp=2, steps=HALF), folder)
    return folder


MISTAKES = [
    next_batch_is_the_last_one_again,
    samples_from_the_start,
    order_of_the_first_epoch_again,
    epoch_starts_with_the_resumed_run,
    position_counted_in_samples_of_a_replica,
    adam_counts_its_updates_anew,
    moments_of_adam_forgotten,
    warm_up_and_decay_start_anew,
    dropout_masks_start_anew,
]


@sweep("mistake", [list, *MISTAKES], ids=lambda mistake: mistake.__name__, quick=(3,))
def test_mistake_is_found(
    pool: WorkerPool, run: Run, half: Path, unbroken: list[float], tmp_path: Path, mistake: Callable[[], list[Patch]]
) -> None:
    """Resumed on three replicas. Without a mistake (`list`), the losses are those of the unbroken run."""
    folder = shutil.copytree(half, tmp_path / "run")
    pool.run(3, resumed, mistake, run.but(dp=3, steps=WHOLE), folder)
    losses = losses_of(folder)
    assert same(losses[:HALF], unbroken[:HALF], "fp64")
    assert same(losses, unbroken, "fp64") == (mistake is list)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [list, masters_from_the_narrow_weights])
def test_mistake_of_narrow_weights_is_found(
    pool: WorkerPool, small_run: Run, tmp_path: Path, mistake: Callable[[], list[Patch]]
) -> None:
    run = small_run.but(dtype="bf16")
    pool.run(1, train_rank, run.but(steps=WHOLE), tmp_path / "unbroken")
    pool.run(1, train_rank, run.but(steps=HALF), tmp_path / "broken")
    pool.run(1, resumed, mistake, run.but(steps=WHOLE), tmp_path / "broken")
    assert (losses_of(tmp_path / "broken") == losses_of(tmp_path / "unbroken")) == (mistake is list)
