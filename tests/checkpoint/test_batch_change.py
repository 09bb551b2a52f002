"""A run that is resumed with another global batch reads on exactly where it was, in every layout."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, manifest, same, steps_of, train_rank
from threefold.checkpoint.resume import find_resumption
from threefold.data.dataset import open_dataset
from threefold.data.order import ConsumedSamples
from threefold.errors import UserError
from threefold.train.run import open_loader, open_samples
from threefold.verify.worker_pool import WorkerPool

BEFORE, AFTER, WHOLE = 3, 6, 9


def batch(run: Run, size: int, **changes: Any) -> Run:
    return run.but(**{**changes, "set": (*run.set, *changes.get("set", ()), ("train.global_batch_size", size))})


def changed_run(pool: WorkerPool, runs: list[Run], folder: Path) -> list[float]:
    """Losses of a run of three segments, each with its own layout and global batch."""
    for number, (run, steps) in enumerate(zip(runs, (BEFORE, AFTER, WHOLE), strict=True)):
        pool.run(run.world_size, train_rank, run.but(steps=steps), folder, number > 0)
    return losses_of(folder)


@sweep(
    ("layouts", "sizes"),
    [
        (({}, {"dp": 2, "tp": 2}, {"pp": 2}), (8, 16, 16)),
        (({"dp": 4}, {"dp": 3}, {"dp": 2, "cp": 2}), (8, 12, 4)),
        (({"tp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "set": (("parallel.zero", 3),)}), (16, 4, 6)),
    ],
    ids=str,
    slow=(0, 2),
)
def test_another_batch_goes_on_equal_in_every_layout(
    pool: WorkerPool, small_run: Run, tmp_path: Path, layouts: Any, sizes: tuple[int, ...]
) -> None:
    run = small_run.but(dtype="fp64")
    alone = changed_run(pool, [batch(run, size) for size in sizes], tmp_path / "alone")
    split = changed_run(
        pool, [batch(run, size, **each) for each, size in zip(layouts, sizes, strict=True)], tmp_path / "split"
    )
    assert same(split, alone, "fp64")
    consumed = BEFORE * sizes[0] + (AFTER - BEFORE) * sizes[1] + (WHOLE - AFTER) * sizes[2]
    facts = manifest(tmp_path / "split" / "checkpoints" / f"step_{WHOLE:08d}")
    assert (facts["step"], facts["consumed_samples"]) == (WHOLE, consumed)
    steps = steps_of(tmp_path / "split")
    assert "consumed_samples" not in steps[BEFORE]
    assert [steps[step]["consumed_samples"] for step in (BEFORE + 1, WHOLE)] == [
        sum(sizes[:1]) * BEFORE + sizes[1],
        consumed,
    ]


@pytest.mark.slow
def test_a_run_of_another_batch_resumes_bit_equal(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Interrupted after the change, it continues with the bits of the one that was not."""
    larger = batch(small_run, 16, dp=2)
    for folder, stops in (("unbroken", (WHOLE,)), ("broken", (4, 7, WHOLE))):
        pool.run(1, train_rank, small_run.but(steps=BEFORE), tmp_path / folder)
        for steps in stops:
            pool.run(2, train_rank, larger.but(steps=steps), tmp_path / folder, True)
    assert losses_of(tmp_path / "broken") == losses_of(tmp_path / "unbroken")


def test_the_next_sample_is_exact(small_run: Run) -> None:
    """Batches of 8 and then of 12 are the rows that batches of 4 have, in the same order, over the end of an epoch."""
    run = small_run.but(set=(("data.split", "10,90"),))
    dataset = open_dataset(run.config)

    def rows(size: int, consumed: ConsumedSamples, first: int, end: int) -> np.ndarray:
        config = batch(run, size).config
        loader = open_loader(config, open_samples(config, dataset), Alone())
        loader.consumed = consumed
        try:
            return np.concatenate([loader.batch(step).tokens.numpy() for step in range(first, end)])
        finally:
            loader.close()

    samples = len(dataset.samples("train"))
    steps = samples // 8 - 1
    total = 8 * steps + 12 * 4
    assert 8 * steps < samples < total
    changed = ConsumedSamples(12, steps, 8 * steps)
    found = [rows(8, ConsumedSamples(8), 0, steps), rows(12, changed, steps, steps + 4)]
    assert np.array_equal(np.concatenate(found), rows(4, ConsumedSamples(4), 0, total // 4))


def test_the_losses_are_those_of_the_next_samples(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """With weights that hardly move, the loss of a step of 16 samples is that of the tokens of the next two of 8."""
    run = small_run.but(dtype="fp64", dropout=0.0, set=(("optimizer.lr", 1e-30),))
    pool.run(1, train_rank, run.but(steps=7), tmp_path / "of 8")
    small, tokens = losses_of(tmp_path / "of 8"), [line["tokens"] for line in steps_of(tmp_path / "of 8").values()]
    pool.run(1, train_rank, run.but(steps=BEFORE), tmp_path / "of 16")
    larger = batch(run, 16, dp=2)
    pool.run(2, train_rank, larger.but(steps=5), tmp_path / "of 16", True)
    sums = [loss * count for loss, count in zip(small, tokens, strict=True)]
    means = [sum(sums[step : step + 2]) / sum(tokens[step : step + 2]) for step in (3, 5)]
    assert losses_of(tmp_path / "of 16") == pytest.approx(small[:3] + means, rel=1e-12)
    assert max(small) > 1.001 * min(small)  # a sample is told from another


class Alone:
    """The dp axis of one replica."""

    index, size = 0, 1


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after step 3, of 24 samples."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(1, train_rank, small_run.but(steps=BEFORE), folder)
    return folder


def test_the_warning_says_what_follows(saved: Path, small_run: Run) -> None:
    (warning,) = find_resumption(saved, batch(small_run, 16, steps=WHOLE).config).warnings
    assert warning == (
        "train.global_batch_size is 16 from here on; up to now it was 8: step 4 reads on after the 24 samples "
        "consumed, and as steps count updates, warm-up, decay and train.max_steps 9 keep their steps, up to which 120 "
        "samples are consumed; optimizer.lr is 0.01 (that of before is 0.02 when scaled linearly, 0.0141 by the "
        "square root)."
    )


def test_a_batch_that_follows_from_the_layout_is_refused(saved: Path, small_run: Run) -> None:
    parts = (("train.micro_batch_size", 4), ("train.gradient_accumulation_steps", 2))
    assert find_resumption(saved, small_run.but(steps=WHOLE, set=parts).config).warnings == ()
    with pytest.raises(
        UserError, match=r"is 16 but .* made with 8, and with train.micro_batch_size and .* set it to 8"
    ):
        find_resumption(saved, batch(small_run, 16, dp=2, steps=WHOLE, set=parts).config)
    alone = find_resumption(saved, batch(small_run, 16, dp=2, steps=WHOLE, set=parts[:1]).config)
    assert len(alone.warnings) == 1


def test_epochs_ask_for_steps(saved: Path, small_run: Run) -> None:
    run = batch(small_run, 16)
    samples = len(open_dataset(run.config).samples("train"))
    with pytest.raises(UserError, match=r"train.epochs is 2, .* has consumed 24 samples in 3 steps") as caught:
        find_resumption(saved, batch(small_run, 16, steps=2 * samples // 16, set=(("train.epochs", 2),)).config)
    steps = 3 + math.ceil((2 * samples - 24) / 16)
    assert re.search(r"give train.max_steps ([\d,]+) in its place", str(caught.value))[1] == f"{steps:,}"  # type: ignore[index]


def test_steps_until() -> None:
    consumed = ConsumedSamples(16, step=3, samples=24)
    assert [consumed.steps_until(samples) for samples in (8, 24, 25, 40, 41)] == [2, 3, 4, 4, 5]
    assert [consumed.before(consumed.steps_until(samples)) >= samples for samples in (24, 25, 40, 41)] == [True] * 4
