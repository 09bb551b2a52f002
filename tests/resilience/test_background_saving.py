"""Checkpoints that are written beside the training are those that it would have waited for, whenever it is killed."""

import contextlib
import io
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.kills import KILLS, require_whole_one
from tests.resilience.faults import Fault, train_with
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, train, train_rank
from threefold.checkpoint.folder import complete
from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.tensors import load_tensors
from threefold.comm.mesh import Mesh
from threefold.resilience.background_saving import BackgroundSaver
from threefold.train.callbacks.base import Callback
from threefold.train.callbacks.records import StepRecord
from threefold.verify.worker_pool import WorkerPool

ASYNC = ("checkpoint.async_save", True)


def files_of(run_dir: Path) -> dict[str, bytes]:
    """The content of all files of all checkpoints that do not have the config in them."""
    found = {}
    for path in sorted((run_dir / "checkpoints").rglob("*")):
        if path.is_file() and path.name not in ("config.yaml", "checkpoint.json", "writer.json"):
            found[str(path.relative_to(run_dir))] = path.read_bytes()
    return found


@sweep(
    ("layout", "settings"),
    [
        ({"dp": 2, "tp": 2}, (("parallel.zero", 1),)),
        ({"dp": 2, "tp": 2}, (("parallel.zero", 3),)),
        ({"dp": 2, "pp": 2}, (("precision.dtype", "bf16"),)),
    ],
    slow=(0, 2),
)
def test_the_bytes_are_those_of_a_synchronous_save(
    pool: WorkerPool, small_run: Run, tmp_path: Path, layout: dict[str, int], settings: tuple[tuple[str, Any], ...]
) -> None:
    """Of a checkpoint after each step, so that the state changes under one that is being written."""
    run = small_run.but(steps=5, set=(("checkpoint.every", 1), ("checkpoint.keep", 0), *settings), **layout)
    pool.run(run.world_size, train_rank, run, tmp_path / "waits")
    pool.run(run.world_size, train_rank, run.but(set=(*run.set, ASYNC)), tmp_path / "beside")
    expected = files_of(tmp_path / "waits")
    assert len([name for name in expected if name.endswith("tensors.json")]) == 5
    assert files_of(tmp_path / "beside") == expected
    assert [checkpoint.step for checkpoint in complete(tmp_path / "beside")] == [1, 2, 3, 4, 5]
    assert losses_of(tmp_path / "beside") == losses_of(tmp_path / "waits")
    waits, beside = ([each.facts for each in complete(tmp_path / name)] for name in ("waits", "beside"))
    assert beside == waits


@sweep(("event", "place", "rank"), KILLS, slow=(0, 1, 2))
def test_a_kill_while_one_is_written_leaves_a_whole_one(
    pool: WorkerPool, small_run: Run, tmp_path: Path, event: str, place: str, rank: int
) -> None:
    require_whole_one(pool, small_run.but(set=(*small_run.set, ASYNC)), tmp_path, event, place, rank)


class Told(Callback):
    """Notes what it is told of checkpoints, and of each whether it is complete then."""

    ranks = "all"

    def __init__(self) -> None:
        self.moments: list[tuple[str, int, bool]] = []

    def before_checkpoint(self, step: int) -> None:
        self.moments.append(("before", step, True))

    def after_staging(self, step: int) -> None:
        self.moments.append(("copied", step, True))

    def after_checkpoint(self, step: int, path: Path) -> None:
        self.moments.append(("complete", step, (path / "checkpoint.json").exists()))


def told(run: Run, folder: Path) -> list[tuple[str, int, bool]]:
    callback = Told()
    with contextlib.redirect_stdout(io.StringIO()):
        train(run.config, folder, False, callbacks=[callback])
    return callback.moments


def test_callbacks_hear_of_complete_checkpoints_alike_on_all_ranks(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    run = small_run.but(dp=2, steps=5, set=(("checkpoint.every", 2), ASYNC))
    first, second = pool.run(2, told, run, tmp_path)
    assert first == second
    assert all(whole for _, _, whole in first)
    for step in (2, 4):
        moments = [first.index((moment, step, True)) for moment in ("before", "copied", "complete")]
        assert moments == sorted(moments)
    assert first[-2:] == [("before", 5, True), ("complete", 5, True)]  # the last is waited for
    assert len(first) == 8


class ToldOfRollbacks(Told):
    """Has the checkpoint of a step written only after the next step."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self._late, self._made = late, threading.Event()
        sys.addaudithook(self._hold)

    def _hold(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "os.rename" and str(arguments[0]).endswith(f"step_{self._late:08d}.partial"):
            self._made.wait(60)

    def after_step(self, record: StepRecord) -> None:
        if record.step > self._late:
            self._made.set()

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self.moments.append(("rollback", start, True))


def told_of_rollback(run: Run, folder: Path) -> list[tuple[str, int, bool]]:
    callback = ToldOfRollbacks(2)
    train_with([Fault("updated", "blocks.1.mlp.up", 0, 3)], run, folder, callbacks=[callback])
    return callback.moments


def test_a_rollback_goes_back_to_a_checkpoint_that_callbacks_have_heard_of(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    """The update of step 3 is bad, which is seen when its checkpoint is due; that of step 2 is being written."""
    run = small_run.but(set=(("checkpoint.every", 1), ("train.on_nan", "rollback"), ASYNC))
    (moments,) = pool.run(1, told_of_rollback, run, tmp_path)
    complete_at = moments.index(("complete", 2, True))
    assert complete_at < moments.index(("rollback", 2, True))
    assert moments.count(("complete", 2, True)) == 1


def test_what_is_written_is_the_state_at_the_save(tmp_path: Path) -> None:
    """Although nothing is written before the state has changed, and the memory of the copy is used twice."""
    tensors = {"model.table": torch.arange(12.0).view(3, 4), "model.bias": torch.ones(5, dtype=torch.bfloat16)}
    saver, begins = BackgroundSaver(Mesh.alone()), threading.Event()
    for step in (1, 2):
        begins.clear()
        saver.then(lambda: begins.wait(60) and None)
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        path = saver.save(tmp_path, Facts(step, 0, 0, None, None, 0, 0), tensors, {})
        for tensor in tensors.values():
            tensor += 100
        assert not saver.is_done
        begins.set()
        written = saver.wait()
        assert written is not None
        assert (written.step, written.path, written.failure) == (step, path, None)
        assert saver.wait() is None  # it is returned once
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_tensors(found, path, alone=True)
        assert all(torch.equal(found[name], expected[name]) for name in tensors)
    assert saver.end(0)
