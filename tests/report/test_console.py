"""The lines by which people follow a run."""

from pathlib import Path

import pytest

from tests.train.support import Run, train_rank
from threefold.report.console import RunningLines, live_text
from threefold.train.callbacks.base import on_terminal
from threefold.train.callbacks.records import EvaluationRecord, Performance, StepRecord
from threefold.verify.worker_pool import WorkerPool


def record(step: int, loss: float, **more: object) -> StepRecord:
    used = Performance(2e9, 0.331, 350_000_000, 373_000_000, 3, 0.283, 9.4)
    return StepRecord(step, loss, 1.0, 2.11e-3, 2048, 2048, 0, step - 1, 0.01, 0.479, performance=used, **more)  # type: ignore[arg-type]


def test_a_line_says_what_a_person_follows() -> None:
    lines = RunningLines(500)
    assert lines.step([record(1, 8.32)]) == (
        "step   1/500  loss 8.3200  lr 2.11e-03  4,276 tok/s  479 ms (59% waiting)  33.1% MFU  373.0 MB  3:59 left"
    )
    evaluated = EvaluationRecord(2, 5.7829, 1536, 0.15, {"books": 6.5})
    assert lines.evaluation(evaluated) == "step   2/500  validation loss 5.7829  of books 6.5000  0.1 s"
    assert lines.step([record(2, 6.0), record(3, 5.4565)]).startswith("step   3/500  loss 5.4565 ↓  val 5.7829  lr ")
    assert "loss 5.4570  val" in lines.step([record(4, 5.4570)])
    assert "loss 5.6000 ↑  " in lines.step([record(5, 5.6)])
    assert lines.step([record(500, 5.0)]).endswith("373.0 MB  0:09 in all")
    assert lines.of(12, "checkpoint: x") == "step  12/500  checkpoint: x"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_terminal_of_any_width_has_one_line_with_what_matters_most(width: int) -> None:
    lines = RunningLines(500)
    lines.evaluation(EvaluationRecord(200, 5.7829, 1536, 0.15))
    line = live_text(lines, [record(224, 5.5), record(225, 5.4565)], width)
    assert len(line.plain) < width
    assert line.plain.startswith("step 225/500  ")
    assert line.plain.endswith(" left")
    assert "loss 5.4565 ↓" in line.plain
    has = {
        part: part in line.plain for part in ("val 5.7829", "4,276 tok/s", "lr 2.11e-03", "waiting", "373.0 MB", "━")
    }
    assert list(has.values()) == {40: [0] * 6, 80: [1, 1, 0, 0, 0, 0], 120: [1] * 5 + [0], 200: [1] * 6}[width]
    styles = {line.plain[span.start : span.end]: span.style for span in line.spans}
    assert styles["loss 5.4565 ↓"] == "bold green"
    assert styles.get("479 ms (59% waiting)", "yellow") == "yellow"
    (rising,) = (
        each for each in live_text(lines, [record(1, 5.0), record(2, 5.1)], width).spans if "bold" in str(each.style)
    )
    assert rising.style == "bold yellow"


def test_a_dumb_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot redraw a line, so the lines of steps are printed there as in a file."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    found = {}
    for term in ("xterm-256color", "dumb"):
        monkeypatch.setenv("TERM", term)
        found[term] = on_terminal()
    assert found == {"xterm-256color": True, "dumb": False}


def test_what_only_some_runs_have() -> None:
    lines = RunningLines(2_000)
    line = lines.step([record(1_000, 5.0, terms={"balance": 0.25}, loss_scale=65536.0, unit="samples")])
    assert line.startswith(
        "step 1,000/2,000  loss 5.0000  balance 0.2500  lr 2.11e-03  loss scale 65,536  4,276 samples/s"
    )


@pytest.mark.parametrize("form", ["short", "fleet"])
def test_the_file_has_all_values_and_the_console_what_is_asked_for(
    pool: WorkerPool, small_run: Run, tmp_path: Path, form: str
) -> None:
    run = small_run.but(steps=2, set=(("log.format", form),))
    (printed,) = pool.run(1, train_rank, run, tmp_path / "run", False, True)
    logged = (tmp_path / "run" / "train.log").read_text()
    assert "global step 2, " in logged
    assert (logged in printed) == (form == "fleet")
    assert ("step 2/2  loss " in printed) == (form == "short")
