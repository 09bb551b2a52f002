"""A callback ends a run: from any one rank, with its reason, at the same step in every layout; and one that raises."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import ready
from tests.support.metrics import MEASURED
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, record, steps_of, train_rank
from threefold.checkpoint.folder import newest
from threefold.errors import UserError
from threefold.report.callbacks import EarlyStopping
from threefold.report.metrics import read_metrics
from threefold.train.callbacks.base import Callback, RunContext
from threefold.train.callbacks.records import EvaluationRecord, StepRecord
from threefold.train.run import RunOptions, train
from threefold.train.stop import Stopped
from threefold.verify.worker_pool import WorkerError, WorkerPool

EVERY_RANK = "all"


class OnOneRank(Callback):
    """Stops the run from one rank, within one of its moments, or raises there; writes down the moments of each rank."""

    ranks = EVERY_RANK

    def __init__(self, rank: int, moment: str, step: int, raises: bool = False) -> None:
        self.rank, self.moment, self.step, self.raises = rank, moment, step, raises
        self.calls: list[str] = []

    def setup(self, run: RunContext) -> None:
        self.here = run.mesh.rank
        self.calls.append("setup")

    def before_fit(self, start: int) -> None:
        self._called("before_fit", start)

    def before_epoch(self, epoch: int) -> None:
        self._called("before_epoch", epoch)

    def before_step(self, step: int, batch: Any) -> None:
        self._called("before_step", step)

    def after_step(self, record: StepRecord) -> None:
        self._called("after_step", record.step)

    def after_epoch(self, epoch: int) -> None:
        self._called("after_epoch", epoch)

    def before_evaluation(self, step: int) -> None:
        self._called("before_evaluation", step)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._called("after_evaluation", record.step)

    def before_checkpoint(self, step: int) -> None:
        self._called("before_checkpoint", step)

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._called("after_checkpoint", step)

    def after_stop(self, step: int, reason: str) -> None:
        self.calls.append(f"after_stop {step} {reason}")

    def after_fit(self) -> None:
        self.calls.append("after_fit")

    def close(self) -> None:
        self.calls.append("close")

    def _called(self, moment: str, step: int) -> None:
        self.calls.append(f"{moment} {step}")
        if (self.here, moment, step) == (self.rank, self.moment, self.step):
            if self.raises:
                raise ValueError("a mistake")
            self.stop(f"rank {self.here} has\nseen enough")


def stopped(run: Run, folder: Path, callback: OnOneRank) -> tuple[Stopped | None, list[str]]:
    ended = train(run.config, folder, False, RunOptions(callbacks=[callback]))
    return ended, callback.calls


def of(run: Run, **changes: Any) -> Run:
    settings = (("train.eval_every", 2), ("train.eval_batches", 1), ("checkpoint.every", 3))
    return run.but(steps=5, set=(*run.set, *settings), **changes)


EVALUATED = ["before_evaluation {0}", "after_evaluation {0}"]
SAVED = ["before_checkpoint {0}", "after_checkpoint {0}"]
STEP = ["before_step {0}", "after_step {0}"]


def told(events: list[str], step: int) -> list[str]:
    return [event.format(step) for event in events]


@pytest.mark.slow
def test_stop_from_a_rank_that_is_not_the_first(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """On dp 2 · tp 2 · pp 2: rank 5 asks after step 1, which the collective of step 2 tells all; each rank has had the
    same moments in the same order, the checkpoint is of that step, and the reason is one line."""
    run = of(small_run, dp=2, tp=2, pp=2)
    ended = pool.run(8, stopped, run, tmp_path, OnOneRank(5, "after_step", 1))
    reason = "rank 5 has seen enough"
    assert [stop for stop, _ in ended] == [Stopped(0, 2, reason)] * 8
    expected = ["setup", "before_fit 0", "before_epoch 0", *told(STEP, 1), *told(STEP, 2), *told(SAVED, 2)]
    assert [calls for _, calls in ended] == [[*expected, f"after_stop 2 {reason}", "after_fit", "close"]] * 8
    assert list(steps_of(tmp_path)) == [1, 2]
    saved = newest(tmp_path)
    assert saved is not None
    assert saved.step == 2
    assert (tmp_path / "train.log").read_text().splitlines()[-1] == f"global step 2, stopped: {reason}"
    assert (tmp_path / "loss.png").exists(), "the run ended as one that is finished"


@sweep(
    ("moment", "step", "last"),
    [
        ("before_fit", 0, 0),
        ("before_step", 2, 2),
        ("after_evaluation", 2, 2),
        ("after_checkpoint", 3, 3),
        ("after_step", 4, 4),  # the evaluation after it tells all
        ("after_step", 5, 5),
    ],
    quick=(3, 4),
)
def test_a_stop_at_each_moment(
    pool: WorkerPool, small_run: Run, tmp_path: Path, moment: str, step: int, last: int
) -> None:
    """From one of two ranks; one that comes too late to save a step leaves the run complete."""
    ended = pool.run(2, stopped, of(small_run, dp=2), tmp_path, OnOneRank(1, moment, step))
    expected = None if last == 5 else Stopped(0, last, "rank 1 has seen enough")
    assert [stop for stop, _ in ended] == [expected] * 2
    assert len(steps_of(tmp_path)) == last
    assert ended[0][1] == ended[1][1]


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """All steps and evaluations, but for their speed."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


@pytest.mark.slow
def test_an_evaluation_that_a_stop_has_ended_is_made_when_the_run_continues(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    run = of(small_run, dp=2)
    pool.run(2, stopped, run, tmp_path / "parts", OnOneRank(1, "before_evaluation", 2))
    assert [line["step"] for line in lines_of(tmp_path / "parts")] == [1, 2]
    saved = newest(tmp_path / "parts")
    assert saved is not None
    assert saved.facts.evaluation_missed
    pool.run(2, train_rank, run, tmp_path / "parts", True)
    pool.run(2, train_rank, run, tmp_path / "whole")
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    last = newest(tmp_path / "parts")
    assert last is not None
    assert not last.facts.evaluation_missed


def test_the_order_of_the_moments_on_every_rank_of_a_pipeline(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    ended = pool.run(2, stopped, of(small_run, pp=2), tmp_path, OnOneRank(9, "", 0))
    expected = ["setup", "before_fit 0", "before_epoch 0"]
    for step in range(1, 6):
        expected += told(STEP, step)
        expected += told(EVALUATED, step) if step in (2, 4, 5) else []
        expected += told(SAVED, step) if step in (3, 5) else []
    assert ended == [(None, [*expected, "after_fit", "close"])] * 2


@pytest.mark.parametrize("moment", ["before_fit", "before_step", "after_evaluation", "before_checkpoint"])
def test_a_callback_that_raises_on_one_rank(pool: WorkerPool, small_run: Run, tmp_path: Path, moment: str) -> None:
    """The run ends in one sentence that names it and its rank."""
    step = {"before_fit": 0, "before_checkpoint": 3}.get(moment, 2)
    with pytest.raises(WorkerError) as caught:
        pool.run(2, stopped, of(small_run, dp=2), tmp_path, OnOneRank(1, moment, step, raises=True))
    assert isinstance(caught.value.error, UserError)
    sentence = f"The callback OnOneRank on rank 1 failed in {moment} with ValueError: a mistake."
    assert str(caught.value.error) == sentence


def early(run: Run, folder: Path, resume: bool, **arguments: Any) -> tuple[Stopped | None, int, float]:
    stopping = EarlyStopping(**arguments)
    ended = train(run.config, folder, resume, RunOptions(callbacks=[stopping]))
    return ended, stopping.waited, stopping.best


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2, "pp": 2},
    {"dp": 2, "set": (("parallel.zero", 3),)},
    {"tp": 4},
    {"pp": 3},
    {"cp": 2, "dp": 2},
]


@sweep("changes", LAYOUTS, slow=(0, 2), ids=str)
def test_early_stopping_at_the_same_step_in_every_layout(
    pool: WorkerPool, small_run: Run, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """No evaluation is an improvement by 1 nat: the first is the best, and two more make it enough."""
    run = small_run.but(steps=9, set=(("train.eval_every", 1), ("train.eval_batches", 1)))
    arguments = {"patience": 2, "min_delta": 1.0}
    reason, best = re.compile(r"valid_loss has not improved on (\d\.\d+) 2 times in a row"), []
    for number, each in enumerate((run, run.but(**{**changes, "set": (*run.set, *changes.get("set", ()))}))):
        folder = tmp_path / str(number)
        ended = pool.run(each.world_size, _early, each, folder, False, arguments)
        assert {(stop.step, stop.signal) for stop, *_ in ended} == {(3, 0)}
        (said,) = {stop.reason for stop, *_ in ended}
        found = reason.fullmatch(said)
        assert found is not None, said
        best.append(float(found[1]))
        assert len(losses_of(folder)) == 3
    assert best[1] == pytest.approx(best[0], rel=1e-5), "each rank judges by the loss of the whole split"


def _early(run: Run, folder: Path, resume: bool, arguments: dict[str, Any]) -> tuple[Stopped | None, int, float]:
    return early(run, folder, resume, **arguments)


def test_early_stopping_goes_on_counting_in_a_resumed_run(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(steps=9, set=(("train.eval_every", 1), ("train.eval_batches", 1)))
    arguments = {"patience": 4, "min_delta": 1.0}
    ((_, waited, best),) = pool.run(1, _early, run.but(steps=3), tmp_path, False, arguments)
    assert waited == 2
    ((ended, again, same),) = pool.run(1, _early, run, tmp_path, True, arguments)
    assert (ended.step, again, same) == (5, 4, best)


def test_what_early_stopping_counts() -> None:
    stopping = EarlyStopping("loss", patience=2, min_delta=0.1)
    reasons = []
    for step, loss in enumerate((3.0, 2.95, 2.8, float("nan"), 2.75), 1):
        stopping.after_step(record(step, loss=loss))
        reasons.append(stopping.stop_reason)
    assert reasons == [None, None, None, None, "loss has not improved on 2.8 2 times in a row"]
    highest = EarlyStopping("grad_norm", patience=1, mode="max")
    highest.after_step(record(1, grad_norm=1.0))
    highest.after_step(record(2, grad_norm=1.5))
    assert (highest.best, highest.stop_reason) == (1.5, None)
    highest.after_step(replace(record(3, grad_norm=0.1), skipped=True))
    assert highest.stop_reason is None
    highest.after_step(record(4, grad_norm=1.5))
    assert highest.stop_reason == "grad_norm has not improved on 1.5 1 time"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"monitor": "val_loss"}, "monitor 'val_loss' but it must be one of .*; the nearest is valid_loss"),
        ({"patience": 0}, "patience 0 but it must be a whole number of at least 1; use 3"),
        ({"min_delta": -0.1}, r"min_delta -0.1 but it must be a number of at least 0; use 0\.0"),
        ({"mode": "lower"}, "mode 'lower' but it must be one of min, max"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^EarlyStopping has {sentence}"):
        EarlyStopping(**arguments)


def test_a_monitor_that_is_never_measured(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"train\.eval_every is 0, so that it is never measured"):
        pool.run(1, _early, small_run, tmp_path, False, {})


@pytest.mark.slow
def test_the_command_says_why_it_stopped(small_run: Run, tmp_path: Path) -> None:
    """From the config, with arguments: printed once, exit status 0, and the run can be resumed."""
    import yaml

    settings: tuple[tuple[str, Any], ...] = (("train.eval_every", 1), ("train.eval_batches", 1))
    sections = small_run.but(dp=2, steps=9, set=settings).config.sections()
    sections["train"]["callbacks"] = ["csv_log", {"name": "early_stopping", "patience": 1, "min_delta": 9}]
    config, run = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(sections))
    ended = ready.run([sys.executable, "-m", "threefold", "train", config, "--run-dir", run])
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stdout.splitlines() if line.startswith("Stopped")]
    where = run / "checkpoints/step_00000002"
    start = f"Stopped by a callback after step 2, which is saved in {where}: valid_loss has not improved on"
    assert len(told) == 1
    assert told[0].startswith(start)
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + 2 + 2
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
