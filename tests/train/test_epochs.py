"""`train.epochs`: how many steps they are, what is stored of it, and that a run resumes on the bound of one."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.support import Run, losses_of
from threefold.config import Config, load_config, resolve
from threefold.config.loading import config_of
from threefold.data.dataset import open_dataset
from threefold.errors import UserError
from threefold.launch.training_run import prepare_training
from threefold.verify.worker_pool import WorkerPool


def config(**train: Any) -> Config:
    return config_of({"data": {"path": "unused"}, "model": {"vocab_size": 64}, "train": train})


@pytest.mark.parametrize(
    ("epochs", "samples", "batch", "steps"), [(1, 96, 32, 3), (1, 97, 32, 4), (3, 97, 32, 10), (2, 5, 32, 1)]
)
def test_each_epoch_reads_every_sample(epochs: int, samples: int, batch: int, steps: int) -> None:
    """The last batch is filled up with the first samples of the next epoch."""
    found = resolve(config(epochs=epochs, global_batch_size=batch), 1, samples=samples)
    assert (found.train.max_steps, found.optimizer.decay_steps) == (steps, steps)
    assert steps * batch >= epochs * samples > (steps - 1) * batch
    assert resolve(found, 1) == found
    assert "max_steps" not in yaml.safe_load(found.to_yaml_as_given())["train"], "it is derived again"
    assert yaml.safe_load(found.to_yaml_as_given(kept=("train.max_steps",)))["train"]["max_steps"] == steps


def test_both_given() -> None:
    """An error unless they are equal in meaning."""
    assert resolve(config(epochs=2, max_steps=7), 1, samples=97).train.max_steps == 7
    rule = r"^train\.max_steps is 6 but train\.epochs is 2 too, and 2 · 97 samples in batches of 32 are 7 steps; leave"
    with pytest.raises(UserError, match=rule):
        resolve(config(epochs=2, max_steps=6), 1, samples=97)
    with pytest.raises(UserError, match=r"^train\.eval_every is 5 but train\.eval_every_epochs is 1 too; leave one of"):
        resolve(config(epochs=2, eval_every=5, eval_every_epochs=1), 1)
    assert resolve(config(eval_every_epochs=1), 1).train.eval_every == 0
    assert resolve(config(epochs=2, eval_every=5), 1).train.eval_every == 5


def test_a_warm_up_longer_than_the_default_number_of_steps() -> None:
    """Before the data is known, no rule about steps is applied to a number that nobody gave."""
    given = config_of({"data": {"path": "x"}, "train": {"epochs": 9}, "optimizer": {"warmup_steps": 5000}})
    resolve(given, 64)


def rank(sections: dict[str, Any], folder: Path, resume: bool) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_training(config_of(sections), folder, resume=resume).start_here()


@pytest.mark.slow
def test_a_run_resumes_on_the_bound_of_an_epoch(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """To the bit as the uninterrupted run: one that ended exactly with an epoch, and goes on for another one."""
    base = small_run.but(set=(("data.split", "4,96"),)).config
    samples = len(open_dataset(base).samples("train", base.data))
    batch = max(size for size in range(2, samples // 2 + 1) if samples % size == 0)
    sections = base.sections()
    sections["train"] = {"global_batch_size": batch, "eval_every": 0, "device": "cpu", "epochs": 2}
    pool.run(1, rank, sections, tmp_path / "two", False)
    one = {**sections, "train": {**sections["train"], "epochs": 1}}
    pool.run(1, rank, one, tmp_path / "one", False)
    per_epoch = samples // batch
    assert len(losses_of(tmp_path / "one")) == per_epoch
    stored = load_config(tmp_path / "one/config.yaml", ["train.epochs=2"])
    assert not stored.is_given("train.max_steps")
    pool.run(1, rank, {**stored.sections(), "train": sections["train"]}, tmp_path / "one", True)
    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "two")
    assert len(losses_of(tmp_path / "two")) == 2 * per_epoch
