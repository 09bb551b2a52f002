"""The ledger of where a run's time went, over its attempts."""

import os
import time
from pathlib import Path

import pytest

from tests.train.support import record
from threefold.report.goodput import Goodput, GoodputLedger
from threefold.report.metrics import MetricsFile, read_metrics_file
from threefold.train.attempt import Attempt
from threefold.train.callbacks.records import EvaluationRecord


def make_steps(made: GoodputLedger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        made.before_step(step, None)
        made.after_step(record(step, seconds=100.0))


def test_steps_after_a_restart_are_repeated_ones(tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    first = GoodputLedger(path, Attempt(began=time.time() - 10))
    first.before_fit(0)
    make_steps(first, 1, 5)
    first.before_evaluation(5)
    first.after_evaluation(EvaluationRecord(5, 1.0, 2, 0.1))
    known = Goodput.read(path)  # as it is when the process is killed now
    assert known is not None
    assert (known.step, known.furthest, known.attempts, known.restarts) == (5, 5, 1, 0)
    assert known.starting == pytest.approx(10, abs=5)
    assert min(known.steps, known.evaluating) > 0 == known.repeated == known.lost

    second = GoodputLedger(path, Attempt(number=1))
    second.before_fit(3)
    assert (Goodput.read(path) or Goodput()).step == 3
    make_steps(second, 4, 5)
    again = Goodput.read(path)
    assert again is not None
    assert again.steps == known.steps
    assert again.repeated > 0 < again.lost
    make_steps(second, 6, 6)
    second.before_checkpoint(6)
    second.after_checkpoint(6, tmp_path)
    second.after_fit()
    second.close()
    ended = Goodput.read(path)
    assert ended is not None
    assert ended.steps > known.steps
    assert ended.repeated == again.repeated
    assert (ended.step, ended.attempts, ended.restarts) == (6, 2, 1)
    parts = ended.steps + ended.repeated + ended.evaluating + ended.saving + ended.starting + ended.lost
    assert 0 < parts <= ended.total + 1e-9
    assert ended.fraction == ended.steps / ended.total


def test_a_new_run_has_a_new_ledger_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    for attempt, start, expected in [(Attempt(), 0, 2), (Attempt(), 2, 4), (Attempt(), 0, 2)]:
        made = GoodputLedger(path, attempt)
        made.before_fit(start)
        make_steps(made, start + 1, start + 2)
        made.close()
        assert (Goodput.read(path) or Goodput()).furthest == expected
    assert made.goodput.attempts == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\0", b'{"steps": 1}\n'])
def test_a_damaged_ledger_begins_anew(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "goodput.json"
    path.write_bytes(content)
    made = GoodputLedger(path, Attempt(number=1))
    made.before_fit(3)
    make_steps(made, 4, 4)
    made.close()
    assert (made.goodput.furthest, capsys.readouterr().out) == (4, "")
    assert Goodput.read(path) == made.goodput


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    made = GoodputLedger(path, Attempt())
    made.before_fit(0)
    make_steps(made, 1, 1)
    made.close()
    content = path.read_bytes()
    assert len(content) == 1024
    for place in range(0, len(content.rstrip()) - 1, 5):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert Goodput.read(path) is None, place


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = GoodputLedger(tmp_path / "gone" / "goodput.json", Attempt())
    made.before_fit(0)
    make_steps(made, 1, 2)
    made.close()
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning.endswith("training continues without it.")


def test_metrics_have_it_beside_the_steps(tmp_path: Path) -> None:
    path, metrics = tmp_path / "goodput.json", tmp_path / "metrics.jsonl"
    made, written = GoodputLedger(path, Attempt()), MetricsFile(metrics, path)
    for each in (made, written):
        each.before_fit(0)
    for step in (1, 2, 3):
        made.before_step(step, None)
        for each in (made, written):
            each.after_step(record(step))
        if step != 2:
            for each in (made, written):
                each.before_checkpoint(step)
                each.after_checkpoint(step, tmp_path)
    for each in (made, written):
        each.close()
    found = read_metrics_file(metrics)
    assert ([line["step"] for line in found.lines], [line["step"] for line in found.goodput]) == ([1, 2, 3], [1, 3])
    assert found.damaged == found.repeated == ()
    assert found.goodput[1]["goodput"] == pytest.approx(made.goodput.fraction, abs=1e-3)
    assert set(found.goodput[1]["seconds"]) >= {"steps", "saving", "evaluating", "starting", "lost", "repeated"}
    resumed = MetricsFile(metrics, path)
    resumed.before_fit(2)
    resumed.close()
    found = read_metrics_file(metrics)
    assert ([line["step"] for line in found.lines], [line["step"] for line in found.goodput]) == ([1, 2], [1])


def test_it_is_written_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its bytes at once, within one page, so that a kill leaves the old or the new ones."""
    calls, pwrite = [], os.pwrite

    def noted(descriptor: int, content: bytes, place: int) -> int:
        calls.append((len(content), place))
        return pwrite(descriptor, content, place)

    monkeypatch.setattr(os, "pwrite", noted)
    made = GoodputLedger(tmp_path / "goodput.json", Attempt())
    made.before_fit(0)
    make_steps(made, 1, 3)
    made.close()
    assert len(calls) >= 4
    assert set(calls) == {(1024, 0)}
