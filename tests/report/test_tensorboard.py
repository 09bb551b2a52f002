"""Event files, read back by TensorBoard's own reader, and failures to write them."""

import os
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train.support import Run, losses_of, train_rank
from threefold.errors import UserError
from threefold.report.tensorboard import TensorBoard, import_writer
from threefold.train.callbacks.registry import check_names
from threefold.verify.worker_pool import WorkerPool


def _scalars(folder: Path, tag: str) -> dict[int, float]:
    found = EventAccumulator(str(folder)).Reload()
    return {event.step: event.value for event in found.Scalars(tag)}


def test_values_of_a_run_that_went_back_replace_those_of_the_steps_before(tmp_path: Path) -> None:
    written = TensorBoard(tmp_path)
    written.before_fit(0)
    for step in (1, 2, 3, 4):
        written.log(step, {"loss": step, "term/balance": 0.5, "valid_loss/books": 2.0})
    written.after_rollback(4, 2, "")
    written.log(3, {"loss": 30.0})
    written.close()
    resumed = TensorBoard(tmp_path)
    resumed.before_fit(3)
    resumed.close()
    assert _scalars(tmp_path, "loss/train") == {1: 1.0, 2: 2.0, 3: 30.0}
    assert _scalars(tmp_path, "terms/balance") == {1: 0.5, 2: 0.5}
    assert _scalars(tmp_path, "loss/validation of books") == {1: 2.0, 2: 2.0}
    assert len(list(tmp_path.iterdir())) == 1, "no file without a value"


def test_a_failure_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On a device that is full, in one sentence, and with no traceback of a thread."""
    written = TensorBoard(tmp_path / "events")
    written.before_fit(0)
    written.log(1, {"loss": 1.0})
    written.connection.flush()
    (file,) = written.folder.iterdir()
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), written.connection._writer.fileno())
    with written.failures_reported():
        written.send(2, {"loss": 2.0})
        written.connection.flush()
    written.log(3, {"loss": 3.0})
    written.close()
    sentence = f"Warning: {written.folder} cannot be written (No space left on device); training continues without it."
    found = capfd.readouterr()
    assert (found.out.splitlines(), found.err) == ([sentence], "")
    assert file.stat().st_size


def _train_without(run: Run, folder: Path) -> str:
    sys.modules["tensorboard"] = None  # type: ignore[assignment]  # as where the package is not installed
    try:
        import_writer()
        return train_rank(run, folder)
    finally:
        del sys.modules["tensorboard"]


def test_a_run_without_the_package_says_how_to_get_it(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Once, however many ranks there are; the run has all else."""
    printed = pool.run(2, _train_without, small_run.but(dp=2), tmp_path)
    sentence = "No files for TensorBoard, which is not installed: pip install 'threefold[tensorboard]'.\n"
    assert [each.count(sentence) for each in printed] == [1, 0]
    assert len(losses_of(tmp_path)) == small_run.steps
    assert not (tmp_path / "tensorboard").exists()


def test_a_config_that_names_it_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    check_names(["tensorboard"])
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"^train\.callbacks has tensorboard, which needs the package tensorboard"):
        check_names(["tensorboard"])
