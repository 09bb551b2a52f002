"""A checkpoint that cannot be written, is lost or cannot be deleted does not end the training."""

import contextlib
import fcntl
import io
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, train, train_rank
from threefold.checkpoint.folder import complete
from threefold.train.callbacks.base import Callback
from threefold.train.callbacks.records import StepRecord
from threefold.verify.worker_pool import WorkerPool

_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10  # <linux/fs.h>


def set_immutable(folder: Path, value: bool) -> None:
    """Let nobody change a folder, not even root, or let them again.

    Raises:
        OSError: the file system has no such flag, or this user may not set it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(handle, _GET_FLAGS, struct.pack("l", 0)))
        changed = flags | _IMMUTABLE if value else flags & ~_IMMUTABLE
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("l", changed))
    finally:
        os.close(handle)


def set_read_only(folder: Path, value: bool) -> None:
    if os.geteuid() == 0:
        set_immutable(folder, value)
    else:
        folder.chmod(0o555 if value else 0o755)


def limit_files(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Trouble(Callback):
    """Makes trouble once the checkpoint of step 2 is complete, and ends it after step 7."""

    ranks = "all"

    def __init__(self, begin: Callable[[], object], end: Callable[[], object] = lambda: None) -> None:
        self.begin, self.end = begin, end

    def after_checkpoint(self, step: int, path: Path) -> None:
        if step == 2:
            self.begin()

    def after_step(self, record: StepRecord) -> None:
        if record.step == 7:
            self.end()


def in_trouble(run: Run, folder: Path, kind: str) -> str:
    """Train while there is trouble; returns what was printed."""
    import torch.distributed as dist

    checkpoints, first = folder / "checkpoints", dist.get_rank() == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    kinds = {
        "full": Trouble(lambda: limit_files(20_000), lambda: limit_files(before)),
        "full at the end": Trouble(lambda: limit_files(20_000)),
        "read-only": Trouble(
            lambda: first and set_read_only(checkpoints, True), lambda: first and set_read_only(checkpoints, False)
        ),
        "deleted": Trouble(lambda: first and shutil.rmtree(checkpoints / "step_00000002")),
        "all deleted": Trouble(lambda: first and shutil.rmtree(checkpoints)),
    }
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            train(run.config, folder, False, callbacks=[kinds[kind]])
    finally:
        limit_files(before)
        if first and kind == "read-only":
            set_read_only(checkpoints, False)
    return printed.getvalue()


@sweep(
    ("kind", "in_background", "kept"),
    [
        ("full", True, [8, 9]),
        ("full", False, [8, 9]),
        ("read-only", False, [8, 9]),
        ("read-only", True, [8, 9]),
        ("deleted", False, [8, 9]),
        ("all deleted", True, [8, 9]),
    ],
    quick=(0,),
)
def test_training_continues_and_saves_again(
    pool: WorkerPool, small_run: Run, tmp_path: Path, kind: str, in_background: bool, kept: list[int]
) -> None:
    """Checkpoints are due after steps 2, 4, 6 and 8, and the last after 9."""
    if kind == "read-only" and os.geteuid() == 0:
        try:
            set_immutable(tmp_path, True)
        except OSError as error:
            pytest.skip(f"root writes to every folder here, and none can be made immutable ({error})")
        set_immutable(tmp_path, False)
    settings = (("checkpoint.every", 2), ("checkpoint.keep", 2), ("checkpoint.async_save", in_background))
    run = small_run.but(dp=2, steps=9, set=settings)
    pool.run(2, train_rank, run, tmp_path / "undisturbed")
    printed, other = pool.run(2, in_trouble, run, tmp_path / "run", kind)
    warnings = [line for line in printed.splitlines() if line.startswith("Warning: ")]
    if kind in ("full", "read-only"):
        (warning,) = [line for line in warnings if "step_0000000" in line]
        assert "step_00000004 cannot be written" in warning
        assert warning.endswith("; training continues, and the next checkpoint that is due tries again.")
    else:
        assert not warnings
    assert "Warning" not in other
    assert [checkpoint.step for checkpoint in complete(tmp_path / "run")] == kept
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        f"step_{step:08d}" for step in kept
    ]
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "undisturbed")


@pytest.mark.slow
def test_nothing_is_pruned_before_a_new_one_is_there(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """The disk is full after the first checkpoint: the run ends with an error at its last step, and resumes."""
    settings = (("checkpoint.every", 2), ("checkpoint.keep", 1), ("checkpoint.async_save", True))
    run = small_run.but(dp=2, steps=7, set=settings)
    with pytest.raises(Exception, match="step_00000007 cannot be written"):
        pool.run(2, in_trouble, run, tmp_path / "run", "full at the end")
    assert [checkpoint.step for checkpoint in complete(tmp_path / "run")] == [2]
    pool.run(2, train_rank, run, tmp_path / "unbroken")
    pool.run(2, train_rank, run, tmp_path / "run", True)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "unbroken")
