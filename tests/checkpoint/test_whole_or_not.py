"""A kill, a full disk or a lost file never leaves a bad checkpoint where a good one is looked for."""

import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.kills import KILLS, require_whole_one
from tests.support import ready
from tests.support.sweep import sweep
from tests.train.support import Run, train_rank
from threefold.checkpoint.folder import complete, newest, path_of, prune
from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.save import save_checkpoint, set_aside_checkpoint, write_checkpoint
from threefold.checkpoint.tensors import load_tensors, save_tensors
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.verify.worker_pool import WorkerPool


@sweep(("event", "place", "rank"), KILLS, quick=(1,))
def test_a_kill_while_saving_leaves_a_whole_one(
    pool: WorkerPool, small_run: Run, tmp_path: Path, event: str, place: str, rank: int
) -> None:
    require_whole_one(pool, small_run, tmp_path, event, place, rank)


def on_a_small_disk(run: Run, folder: Path, largest_file: int) -> str:
    """Go on where no file can grow beyond some size; returns the error that this rank raises."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
        train_rank(run, folder, True)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return "no error"


@sweep("largest_file", [20_000, 30_000_000], quick=(0,))
def test_a_full_disk_leaves_the_one_before(pool: WorkerPool, small_run: Run, tmp_path: Path, largest_file: int) -> None:
    run = small_run.but(dp=2, set=(("checkpoint.keep", 1),))
    pool.run(2, train_rank, run.but(steps=2), tmp_path)
    errors = pool.run(2, on_a_small_disk, run.but(steps=4), tmp_path, largest_file)
    found = newest(tmp_path)
    assert found is not None
    if largest_file > 1_000_000:
        assert (errors, found.step) == (["no error"] * 2, 4)
    else:
        assert errors[0] == errors[1]
        assert "step_00000004 cannot be written" in errors[0]
        assert found.step == 2
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def saved_where_nothing_is(folder: Path) -> str:
    """Save into a run's folder that is not there; returns the error."""
    world = Mesh(Layout(), torch.device("cpu")).world
    facts = Facts(step=4, consumed_samples=4, seed=1, eod=None, tokenizer_sha256=None, tokens=9, documents=1)
    try:
        save_checkpoint(folder, facts, {"model.weight": torch.ones(2)}, {}, world)
    except UserError as error:
        return str(error)
    return ""


def test_a_run_folder_that_is_gone_is_not_made_again(pool: WorkerPool, tmp_path: Path) -> None:
    (error,) = pool.run(1, saved_where_nothing_is, tmp_path / "run")
    assert "step_00000004 cannot be written" in error
    assert not (tmp_path / "run").exists()


def saved_with_a_damaged_index(folder: Path) -> str:
    """Save where the index of the tensors does not stay as written; returns the error."""
    mesh = Mesh(Layout(dp=2), torch.device("cpu"))

    def write(partial: Path) -> None:
        save_tensors({"model.weight": torch.ones(2)}, partial, mesh.world)
        mesh.world.barrier()
        if mesh.world.is_first:
            (partial / "tensors.json").write_text("{")

    facts = Facts(step=4, consumed_samples=4, seed=1, eod=None, tokenizer_sha256=None, tokens=9, documents=1)
    try:
        write_checkpoint(folder, facts, {}, mesh.world, write)
    except UserError as error:
        return str(error)
    return ""


def test_damage_seen_by_the_first_rank_while_saving_is_an_error_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(2, saved_with_a_damaged_index, tmp_path)
    assert first == second
    assert "step_00000004.partial cannot be used: its tensors.json" in first
    assert list((tmp_path / "checkpoints").iterdir()) == []


def saved_twice(folder: Path, at: str) -> None:
    """Save the same step twice, and be killed when a folder that ends in `at` is deleted."""
    world = Mesh.alone().world

    def save(value: float) -> None:
        facts = Facts(2, 0, 0, eod=None, tokenizer_sha256=None, tokens=0, documents=0)
        save_checkpoint(folder, facts, {"model.weight": torch.full((3,), value)}, {}, world)

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "shutil.rmtree" and str(arguments[0]).endswith(at):
            os.kill(os.getpid(), signal.SIGKILL)

    save(1.0)
    sys.addaudithook(watch)
    save(2.0)


@pytest.mark.parametrize("at", ["step_00000002", "step_00000002.partial"])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one(tmp_path: Path, at: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"from pathlib import Path\nfrom {__name__} import saved_twice\nsaved_twice(Path({str(tmp_path)!r}), {at!r})\n"
    )
    ended = ready.run([sys.executable, script])
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 2
    held = {"model.weight": torch.zeros(3)}
    load_tensors(held, found.path, alone=True)
    assert held["model.weight"].tolist() == [2.0] * 3  # it is killed only when the new one has its name
    assert ended.returncode == (-signal.SIGKILL if at.endswith(".partial") else 0), (
        ended.stderr
    )  # a whole one is never deleted


@pytest.fixture
def two(pool: WorkerPool, small_run: Run, tmp_path: Path) -> Path:
    """A run with whole checkpoints after steps 2 and 4."""
    pool.run(1, train_rank, small_run.but(set=(("checkpoint.every", 2), ("checkpoint.keep", 0))), tmp_path)
    return tmp_path


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in complete(run_dir)]


@sweep("name", ["checkpoint.json", "tensors.json", "tensors-00000.bin", "tokenizer.json", "config.yaml"], quick=(0, 2))
def test_one_that_lost_a_file_is_not_whole(two: Path, name: str) -> None:
    assert steps(two) == [2, 4]
    (path_of(two, 4) / name).unlink()
    assert steps(two) == [2]


def test_a_damaged_one_is_replaced(pool: WorkerPool, small_run: Run, two: Path) -> None:
    (path_of(two, 4) / "tensors.json").unlink()
    pool.run(1, train_rank, small_run, two, True)
    assert steps(two) == [2, 4]


def test_pruning_keeps_the_newest(two: Path) -> None:
    shutil.copytree(path_of(two, 4), path_of(two, 4).with_name("step_00000009.partial"))
    prune(two, 0)
    assert steps(two) == [2, 4]
    assert not path_of(two, 9).with_name("step_00000009.partial").exists()
    prune(two, 1, step=2)  # the one after was passed over
    assert steps(two) == [2, 4]
    prune(two, 1)
    assert steps(two) == [4]


def test_one_that_was_being_replaced_counts_until_the_new_one_is_there(
    pool: WorkerPool, small_run: Run, two: Path
) -> None:
    """As a kill leaves it on a file system that cannot exchange two names."""
    replaced = path_of(two, 4).rename(path_of(two, 4).with_name("step_00000004.replaced"))
    assert steps(two) == [2, 4]
    found = newest(two)
    assert found is not None
    assert found.path == replaced
    pool.run(1, train_rank, small_run.but(steps=6, set=(("checkpoint.keep", 0),)), two, True)
    assert steps(two) == [2, 4, 6]
    assert replaced.exists()  # it is the only one of its step
    shutil.copytree(replaced, path_of(two, 4))
    prune(two, 0)
    assert steps(two) == [2, 4, 6]
    assert not replaced.exists()


def test_a_diverged_checkpoint_is_never_resumed_from_while_it_is_set_aside(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although an earlier one of its step is in the way, and deleting that does not end."""
    shutil.copytree(path_of(run, 4), run / "checkpoints" / "step_00000004.diverged")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(UserError, match="killed"):
            set_aside_checkpoint(run, 4, Mesh.alone().world)
    assert [each.step for each in complete(run)] == [2]
    shutil.copytree(run / "checkpoints" / "step_00000004.diverged", path_of(run, 4))
    shutil.rmtree(run / "checkpoints" / "step_00000004.partial")
    assert set_aside_checkpoint(run, 4, Mesh.alone().world) == (
        run / "checkpoints" / "step_00000004.diverged",
        path_of(run, 2),
    )
    assert [each.step for each in complete(run)] == [2]
