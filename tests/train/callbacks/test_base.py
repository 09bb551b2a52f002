"""When each callback is called, and what the reporting ones make of it."""

import json
import random
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import Run, engine_of, record
from threefold.data.dataset import open_dataset
from threefold.report.console import Summary, clock
from threefold.report.loss_curve import smoothed
from threefold.report.metrics import MetricsFile, read_metrics
from threefold.train.callbacks.base import Callback, CallbackFailed, RunContext
from threefold.train.callbacks.records import EvaluationRecord, StepRecord
from threefold.train.callbacks.step_log import StepLog, step_line
from threefold.train.loop import TrainingLoop, is_due
from threefold.train.run import open_loader, open_samples
from threefold.train.saving import SafeSaving
from threefold.verify.worker_pool import WorkerPool


class Recorder(Callback):
    """Writes down every call; fails at `failing`."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.failing = failing

    def __getattribute__(self, name: str) -> Any:
        if not callable(vars(Callback).get(name)) or name.startswith("_") or name == "setup":
            return object.__getattribute__(self, name)

        def call(*arguments: Any) -> None:
            first = getattr(arguments[0], "step", arguments[0]) if arguments else ""
            self.calls.append(f"{name} {first}".strip())
            if self.calls[-1] == self.failing:
                raise RuntimeError(self.failing)

        return call


class NoCheckpoints:
    """Says where checkpoints would be, and writes none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    is_background = False

    def save(self, step: int, last: bool, evaluation_missed: bool) -> Path:
        return self.folder / str(step)

    def finish(self) -> None:
        return None

    def end(self, seconds: float | None = None) -> None:
        pass

    def prune(self, step: int) -> None:
        pass

    def is_finite(self) -> bool:
        return True

    def whole(self) -> list[Path]:
        return []


class EverySecondStep(Callback):
    """Is called in every second step, and no more once it has set its interval to 0 in the fourth."""

    step_interval = 2

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_step(self, step: int, batch: Any) -> None:
        self.calls.append(f"before_step {step}")

    def after_step(self, record: StepRecord) -> None:
        self.calls.append(f"after_step {record.step}")
        if record.step == 4:
            self.step_interval = 0


def recorded(run: Run, folder: Path, start: int, failing: str) -> list[str]:
    return called(run, folder, start, Recorder(failing))


def called(run: Run, folder: Path, start: int, callback: Any) -> list[str]:
    engine = engine_of(run.config)
    with closing(open_loader(run.config, open_samples(run.config, open_dataset(run.config)), engine.mesh.dp)) as loader:
        saving: Any = SafeSaving(NoCheckpoints(folder))  # type: ignore[arg-type]
        trainer = TrainingLoop(RunContext(run.config, folder, engine.mesh), engine, loader, saving, [callback])
        try:
            trainer.fit(start)
        except CallbackFailed as error:
            callback.calls.append(f"raised {error}")
    return list(callback.calls)


def test_the_order_of_the_hooks(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(steps=3, set=(("train.eval_every", 2), ("checkpoint.every", 2)))
    (calls,) = pool.run(1, recorded, run, tmp_path, 0, "")
    ends = ["before_evaluation {0}", "after_evaluation {0}", "before_checkpoint {0}", "after_checkpoint {0}"]
    expected = ["before_fit 0", "before_epoch 0", "before_step 1", "after_step 1", "before_step 2", "after_step 2"]
    expected += [end.format(2) for end in ends] + ["before_step 3", "after_step 3"] + [end.format(3) for end in ends]
    assert calls == [*expected, "after_fit", "close"]


def test_a_callback_names_the_steps_that_it_is_called_in(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(steps=6, set=(("train.eval_every", 0),))
    (calls,) = pool.run(1, called, run, tmp_path, 0, EverySecondStep())
    assert calls == ["before_step 2", "after_step 2", "before_step 4", "after_step 4"]


def test_epochs_begin_and_end(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Resumed inside the first pass, through the second: a step belongs to the epoch in which it begins."""
    run = small_run.but(steps=9, set=(("train.global_batch_size", 48), ("data.split", "10,90")))
    (calls,) = pool.run(1, recorded, run, tmp_path, 1, "")
    epochs = [call for call in calls if "epoch" in call]
    passes = len([call for call in epochs if call.startswith("after")])
    assert passes >= 1
    expected = [f"{event} {epoch}" for epoch in range(passes) for event in ("before_epoch", "after_epoch")]
    assert epochs[: len(expected)] == expected
    assert epochs[len(expected) :] in ([], [f"before_epoch {passes}"])
    assert calls[1:3] == ["before_epoch 0", "before_step 2"]


def test_hooks_are_closed_after_an_error(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    (calls,) = pool.run(1, recorded, small_run, tmp_path, 0, "after_step 2")
    raised = "The callback Recorder on rank 0 failed in after_step with RuntimeError: after_step 2."
    assert calls[-3:] == ["after_step 2", "close", f"raised {raised}"]


@pytest.mark.parametrize(
    ("step", "every", "last", "due"), [(2, 2, 9, True), (3, 2, 9, False), (9, 2, 9, True), (9, 0, 9, False)]
)
def test_what_is_due(step: int, every: int, last: int, due: bool) -> None:
    assert is_due(step, every, last) is due


def test_the_line_of_the_original() -> None:
    assert step_line([record(1)], ranks=8) == (
        "global step 1, epoch: 0, batch: 0, loss: 11.083364487, avg_reader_cost: 0.23392 sec, avg_batch_cost: 2.05344 "
        "sec, speed: 0.49 step/s, ips_total: 3989 tokens/s, ips: 499 tokens/s, learning rate: 5.55556e-09"
    )


def test_costs_are_averages_since_the_line_before(capsys: pytest.CaptureFixture[str]) -> None:
    log = StepLog(Path("/dev/null"), 2, 1)
    for step, seconds in ((1, 9.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        log.after_step(record(step, seconds=seconds, reader_cost=seconds / 10, loss=float(step)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["global step 1", "global step 2", "global step 4"]
    assert (
        "loss: 4.000000000, avg_reader_cost: 0.30000 sec, avg_batch_cost: 3.00000 sec, speed: 0.33 step/s" in lines[2]
    )
    assert "ips_total: 2731 tokens/s" in lines[2]


def test_a_resumed_metrics_file_drops_what_comes_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        callback = MetricsFile(path)
        callback.before_fit(start)
        for step in steps:
            callback.after_step(record(step, loss=start + step / 10))
            callback.after_evaluation(EvaluationRecord(step, 0.5, 10, 1.0))
        callback.close()
    lines = list(read_metrics(path))
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [
        (1, 0.1),
        (2, 0.2),
        (3, 2.3),
        (4, 2.4),
    ]
    assert [line["step"] for line in lines if "valid_loss" in line] == [1, 2, 3, 4]
    assert capsys.readouterr().out == ""


def test_a_new_run_begins_its_metrics_file_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "loss": 9.0, "tokens": 4}) + "\n")
    callback = MetricsFile(path)
    callback.before_fit(0)
    callback.close()
    assert (list(read_metrics(path)), capsys.readouterr().out) == ([], "")


def test_the_summary(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    summary = Summary({"curve": tmp_path / "there", "nothing": tmp_path / "missing"})
    summary.before_fit(0)
    for step in (1, 2):
        summary.after_step(record(step, seconds=2.0, loss=float(step)))
    assert dict(summary.rows())["tokens read"] == "16,384"
    summary.after_step(record(2, seconds=4.0, loss=2.0, tokens=3000, tokens_read=4096, padding=4096, skipped=True))
    summary.after_evaluation(EvaluationRecord(2, 4.5, 10, 1.0))
    rows = dict(summary.rows())
    assert rows["training loss"] == "2.0000 at step 2"
    assert rows["validation loss"] == "4.5000 at step 2"
    assert rows["tokens trained on"] == "16,380 in 3 steps, those counted for the loss"
    assert rows["tokens read"] == "20,480, and 4,096 of padding"
    assert rows["speed"] == "2,560 tokens/s read, 3,072 with padding"
    assert ("curve" in rows, "nothing" in rows) == (True, False)


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_the_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_smoothing_does_not_lag() -> None:
    assert smoothed([1.0, 3.0], 1) == [1.0, 3.0]
    assert smoothed([0.0, 1.0, 5.0, 0.0], 3) == pytest.approx([2.0, 2.0])
    assert smoothed([], 5) == smoothed([1.0], 5) == []
    line = [float(value) for value in range(20)]
    assert smoothed(line, 5) == pytest.approx(line[2:-2])


def test_the_ends_of_a_smoothed_curve_are_as_smooth_as_its_middle() -> None:
    """A curve that ends in the last loss itself dives with it: every value drawn is a mean over the whole span."""
    generator = random.Random(0)
    losses = [5.0 + generator.gauss(0, 0.2) for _ in range(500)]
    losses[0], losses[-1] = 7.0, 3.0
    drawn = smoothed(losses, 25)
    assert len(drawn) == 500 - 24
    assert drawn[0] == pytest.approx(sum(losses[:25]) / 25)
    assert drawn[-1] == pytest.approx(sum(losses[-25:]) / 25)
    assert max(abs(value - 5.0) for value in drawn) < 0.25
    assert max(abs(after - before) for before, after in pairwise(drawn)) < 0.15
