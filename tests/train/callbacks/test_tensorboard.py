"""Event files, read back by TensorBoard's own reader, and the checksums by which it finds damaged ones."""

import random
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from tests.train.support import Run, losses_of, train_rank
from threefold.errors import UserError
from threefold.launch.worker_pool import WorkerPool
from threefold.train.callbacks.registry import check_names
from threefold.train.callbacks.tensorboard import framed, import_writer


def test_records_are_framed_as_tensorboard_reads_them(tmp_path: Path) -> None:
    records = [random.Random(size).randbytes(size) for size in (1, 8, 9, 255, 4096)]
    file = tmp_path / "events"
    file.write_bytes(b"".join(map(framed, records)))
    assert list(RawEventFileLoader(str(file)).Load()) == records
    for record in records:
        assert framed(record)[-4:] == masked_crc32c(record).to_bytes(4, "little")


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
