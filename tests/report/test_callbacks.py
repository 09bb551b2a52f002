"""What the callbacks write that a run has where it names them: CSV, metrics by epoch, timers of the phases."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import Run, steps_of, train, train_rank
from threefold.data.dataset import open_dataset
from threefold.report.callbacks import Table
from threefold.report.metrics import read_metrics
from threefold.train.callbacks.base import Callback
from threefold.train.callbacks.records import StepRecord
from threefold.verify.worker_pool import WorkerPool


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def of(run: Run, *names: Any, **changes: Any) -> Run:
    settings = (("train.eval_every", 2), ("train.eval_batches", 1), ("train.callbacks", list(names)))
    return run.but(set=(*run.set, *settings), **changes)


def test_the_csv_has_what_the_metrics_file_has(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """To the last digit, in the same order; a resumed run drops the rows after its start."""
    run = of(small_run, "csv_log", {"name": "csv_log", "path": "more/again.csv"}, dp=2)
    (tmp_path / "more").mkdir()
    checkpointed = run.but(steps=4, set=(*run.set, ("checkpoint.every", 3), ("checkpoint.keep", 0)))
    pool.run(2, train_rank, checkpointed, tmp_path)
    four = rows(tmp_path / "metrics.csv")
    (tmp_path / "checkpoints/step_00000004/checkpoint.json").unlink()
    pool.run(2, train_rank, checkpointed.but(steps=5), tmp_path, True)
    written = rows(tmp_path / "metrics.csv")
    assert written[:4] == four[:4]
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    for row, line in zip(written, lines, strict=True):
        names = ("loss", "grad_norm", "lr", "tokens") if "loss" in line else ("valid_loss", "valid_tokens")
        assert int(row["step"]) == line["step"]
        assert [float(row[name]) for name in names] == [line[name] for name in names]
        assert [row["valid_loss"] == "", row["loss"] == ""] == ["loss" in line, "valid_loss" in line]
    assert [row["step"] for row in rows(tmp_path / "more/again.csv")] == [row["step"] for row in written]


def test_a_table_keeps_its_whole_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.csv"
    path.write_text('step,text\n1,"a, b"\n2\nx,y\n3,"c\nd"\n4,e\n')
    table = Table(path, ("step", "text"), "step")
    table.before_fit(3)
    table.write({"step": 4})
    table.close()
    assert [tuple(row.values()) for row in rows(path)] == [("1", "a, b"), ("3", "c\nd"), ("4", "")]
    other = Table(path, ("step", "loss"), "step")
    other.before_fit(3)
    other.close()
    assert (path.read_text(), capsys.readouterr().out) == ("step,loss\n", "")


def test_metrics_by_epoch(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Each row is the mean over the tokens of its steps, with the evaluation at its end; the last epoch is cut."""
    few = (
        ("data.split", "8,92"),
        ("train.eval_every_epochs", 1),
        ("train.eval_batches", 1),
        ("train.eval_every", None),
    )
    samples = len(open_dataset(small_run.but(set=few).config).samples("train", small_run.but(set=few).config.data))
    per_epoch = -(-samples // 8)
    assert 2 <= per_epoch <= 12, samples
    run = small_run.but(dp=2, steps=2 * per_epoch + 1, set=(*few, ("train.callbacks", ["epoch_metrics"])))
    printed = pool.run(2, train_rank, run, tmp_path)[0]
    found = rows(tmp_path / "epochs.csv")
    steps = steps_of(tmp_path)
    valid = {
        line["step"]: line["valid_loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" not in line
    }
    ends = [-(-(epoch + 1) * samples // 8) for epoch in range(2)]
    assert list(valid) == [*ends, run.steps]
    bounds = [(1, ends[0]), (ends[0] + 1, ends[1]), (ends[1] + 1, run.steps)]
    assert [(int(row["first_step"]), int(row["last_step"])) for row in found] == bounds
    for row, (first, last) in zip(found, bounds, strict=True):
        inside = [steps[step] for step in range(first, last + 1)]
        tokens = sum(step["tokens"] for step in inside)
        mean = sum(step["loss"] * step["tokens"] for step in inside) / tokens
        assert int(row["tokens"]) == tokens
        assert float(row["loss"]) == pytest.approx(mean, rel=1e-12)
        assert float(row["valid_loss"]) == valid[last]
        assert float(row["seconds"]) > 0
    assert printed.count("epoch 1, steps:") == 1


class Phases(Callback):
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def after_step(self, record: StepRecord) -> None:
        self.records.append(record)


def phases(run: Run, folder: Path) -> list[StepRecord]:
    callback = Phases()
    train(run.config, folder, False, callbacks=[callback])
    return callback.records


def test_phases_add_up_to_the_time_of_their_steps(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = of(small_run, "phase_timers", dp=2, pp=2)
    records = pool.run(4, phases, run, tmp_path)[0]
    names = ["data", "callbacks", "forward_backward", "update"]
    for record in records:
        assert list(record.phases) == names
        assert min(record.phases.values()) >= 0
        assert sum(record.phases.values()) == pytest.approx(record.seconds, rel=1e-9)
    written = json.loads((tmp_path / "phases.json").read_text())
    assert list(written) == [*names, "evaluation", "checkpoint"]
    for name in names:
        assert written[name] == pytest.approx(sum(record.phases[name] for record in records))
    assert written["evaluation"] > 0
    assert written["checkpoint"] > 0
