"""A run whose settings change by step resumes anywhere: before, at and after a change, in another layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import Run, losses_of, manifest, same, steps_of, train_rank
from threefold.checkpoint.resume import find_resumption
from threefold.errors import UserError
from threefold.report.metrics import read_metrics
from threefold.verify.worker_pool import WorkerPool

BATCHES = ("train.global_batch_size", {0: 8, 3: 16, 5: 4})
WHOLE = 7
CONSUMED = [8, 16, 24, 40, 56, 60, 64]


def with_batches(run: Run, *more: tuple[str, Any], **changes: Any) -> Run:
    return run.but(dtype="fp64", set=(*run.set, BATCHES, *more), **changes)


@pytest.fixture(scope="module")
def unbroken(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changes") / "unbroken"
    evaluation = (("train.eval_every", 3), ("train.eval_batches", 2))
    pool.run(1, train_rank, with_batches(small_run, *evaluation, steps=WHOLE), folder)
    return folder


def test_tokens_and_samples_are_those_of_each_step(unbroken: Path) -> None:
    steps = steps_of(unbroken)
    assert [line["consumed_samples"] for line in steps.values()] == CONSUMED
    sizes = [8, 8, 8, 16, 16, 4, 4]
    for line, size in zip(steps.values(), sizes, strict=True):
        assert 0.9 * 16 * size <= line["tokens"] <= 16 * size
    evaluations = [line for line in read_metrics(unbroken / "metrics.jsonl") if "valid_loss" in line]
    assert len({line["valid_tokens"] for line in evaluations}) == 1, "evaluations read batches of one size"
    assert manifest(unbroken / f"checkpoints/step_{WHOLE:08d}")["consumed_samples"] == CONSUMED[-1]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3, 4, 5, 6])
def test_it_resumes_before_at_and_after_a_change(
    pool: WorkerPool, small_run: Run, unbroken: Path, tmp_path: Path, stop: int
) -> None:
    """In another layout and with another micro-batch size."""
    pool.run(2, train_rank, with_batches(small_run, ("train.micro_batch_size", 1), dp=2, steps=stop), tmp_path / "run")
    pool.run(
        2, train_rank, with_batches(small_run, ("train.micro_batch_size", 2), pp=2, steps=WHOLE), tmp_path / "run", True
    )
    assert same(losses_of(tmp_path / "run"), losses_of(unbroken), "fp64")
    assert [line["consumed_samples"] for line in steps_of(tmp_path / "run").values()] == CONSUMED


def test_a_resumed_run_may_change_its_sizes(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(steps=3)
    pool.run(1, train_rank, run, tmp_path / "run")
    longer = run.but(steps=6, set=(("train.global_batch_size", {0: 8, 4: 12}),))
    (warning,) = find_resumption(tmp_path / "run", longer.config).warnings
    assert "is {0: 8, 4: 12} from here on; up to now it was 8: step 4 reads on after the 24 samples consumed" in warning
    assert "56 samples are consumed" in warning
    pool.run(1, train_rank, longer, tmp_path / "run", True)
    assert [line.get("consumed_samples") for line in steps_of(tmp_path / "run").values()][3:] == [32, 44, 56]
    assert (
        json.loads((tmp_path / "run/checkpoints/step_00000006/checkpoint.json").read_text())["consumed_samples"] == 56
    )


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3, 5])
def test_sequence_lengths_resume_anywhere(pool: WorkerPool, small_run: Run, tmp_path: Path, stop: int) -> None:
    lengths = (("data.sequence_length", {0: 8, 2: 32, 4: 16}), ("train.global_batch_size", {0: 8, 3: 16}))
    run = small_run.but(dtype="fp64", set=(*small_run.set, *lengths))
    pool.run(1, train_rank, run.but(steps=6), tmp_path / "unbroken")
    pool.run(2, train_rank, run.but(pp=2, steps=stop), tmp_path / "broken")
    pool.run(4, train_rank, run.but(dp=2, cp=2, steps=6), tmp_path / "broken", True)
    assert same(losses_of(tmp_path / "broken"), losses_of(tmp_path / "unbroken"), "fp64")
    consumed = [line["consumed_samples"] for line in steps_of(tmp_path / "broken").values()]
    assert consumed == [8, 16, 48, 112, 144, 176], "in samples of the shortest length"


def test_the_lengths_of_a_run_stay(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(steps=1, set=(*small_run.set, ("data.sequence_length", {0: 8, 2: 32})))
    pool.run(1, train_rank, run, tmp_path / "run")
    find_resumption(tmp_path / "run", run.but(steps=2).config)
    for key, value in (("data.sequence_length", {0: 8, 3: 32}), ("train.global_batch_size", 16)):
        with pytest.raises(UserError, match=rf"^{key} is .* was made with"):
            find_resumption(tmp_path / "run", run.but(steps=2, set=(*run.set, (key, value))).config)
