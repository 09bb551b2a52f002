"""Copying in the background: a last copy that fails is tried again and told of; as many are kept as were asked for."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.support import ready
from tests.train.support import Run, train_rank
from threefold.checkpoint.folder import complete, path_of
from threefold.resilience.ownership import OWNER_FILE, Claimant
from threefold.resilience.remote import RemoteCheckpoints
from threefold.resilience.remote_copier import RemoteCopier, claim_address
from threefold.verify.worker_pool import WorkerPool


class Told:
    """What a copier told, and the copier: of a folder, whose name a file has until `works` is called."""

    def __init__(self, there: Path, *retries: float) -> None:
        self.there, self.failed, self.kept = there, list[str](), list[str]()
        self.remote = RemoteCheckpoints(f"file://{there}")
        self.copier = RemoteCopier(
            self.remote, 1, None, self.failed.append, self.kept.append, lambda: None, retries or (0.01, 0.01)
        )

    def break_it(self) -> None:
        self.there.write_text("no folder")

    def works(self) -> None:
        self.there.unlink(missing_ok=True)


def test_the_last_copy_is_tried_again(trained: Path, tmp_path: Path) -> None:
    """Its failure is not told of while it may still succeed; that of another is, once, as training goes on."""
    told = Told(tmp_path / "there")
    told.break_it()
    told.copier.add(3, path_of(trained, 3))
    told.copier._wait(None, lambda: None)
    assert len(told.failed) == 1
    told.copier.add(4, path_of(trained, 4), is_last=True)
    assert told.copier.end(progress=told.works) is None
    assert (len(told.failed), told.kept, told.remote.steps()) == (1, [], [4])


def test_a_last_copy_that_fails_to_the_end_is_told_of_once(trained: Path, tmp_path: Path) -> None:
    told = Told(tmp_path / "there")
    told.break_it()
    told.copier.add(4, path_of(trained, 4), is_last=True)
    missing = told.copier.end()
    assert missing is not None
    assert missing.startswith(
        f"The last checkpoint could not be copied in 3 attempts, but {path_of(trained, 4)} is complete, and "
        f"--resume=auto copies it: checkpoint.remote is {told.remote.address}, which cannot be written: "
    )
    assert told.failed == []


def test_a_last_copy_is_not_tried_again_where_the_address_is_anothers(trained: Path, tmp_path: Path) -> None:
    told = Told(tmp_path / "there", 1000.0)
    told.remote.claim(Claimant(tmp_path, False, {}))
    claim_address(told.remote.address, Claimant(tmp_path, True, {}))
    told.copier.add(4, path_of(trained, 4), is_last=True)
    missing = told.copier.end()
    assert missing is not None
    assert missing.startswith("The last checkpoint could not be copied, but")
    assert told.remote.steps() == []


@pytest.mark.parametrize("keep", [1, 2])
def test_as_many_are_kept_as_without_copies(pool: WorkerPool, small_run: Run, tmp_path: Path, keep: int) -> None:
    """Although some are still being copied when they could be deleted."""
    settings = (("checkpoint.every", 1), ("checkpoint.keep", keep), ("checkpoint.remote", f"file://{tmp_path}/there"))
    pool.run(1, train_rank, small_run.but(set=settings), tmp_path / "run")
    assert [each.step for each in complete(tmp_path / "run")] == [4, 3][:keep][::-1]
    assert RemoteCheckpoints(f"file://{tmp_path / 'there'}").steps() == [4, 3][:keep][::-1]


def test_a_resumed_run_copies_what_is_missing(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    there = tmp_path / "there"
    settings = (("checkpoint.every", 2), ("checkpoint.keep", 0), ("checkpoint.remote", f"file://{there}"))
    pool.run(1, train_rank, small_run.but(set=settings), tmp_path / "run")
    shutil.rmtree(path_of(there, 4).parent.parent / "step_00000004")
    pool.run(1, train_rank, small_run.but(steps=6, set=settings), tmp_path / "run", True)
    assert RemoteCheckpoints(f"file://{there}").steps() == [2, 4, 6]


BREAKS = """
import shutil
from pathlib import Path
import threefold

class Breaks(threefold.Callback):
    def after_step(self, record):
        if record.step == 5:
            there = Path({there!r})
            shutil.rmtree(there)
            there.write_text("no folder")
"""


@pytest.mark.slow
def test_storage_that_fails_to_the_end_of_the_run(small_run: Run, tmp_path: Path) -> None:
    """Exit status 2 and one sentence; the same command with --resume=auto makes the copy."""
    there, run, file = tmp_path / "there", tmp_path / "run", tmp_path / "small.yaml"
    (tmp_path / "breaks.py").write_text(BREAKS.format(there=str(there)))
    file.write_text(
        f"data: {{path: {small_run.data}, sequence_length: 16, split: '80,20'}}\n"
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}\n"
        "parallel: {dp: 2}\n"
        "train: {max_steps: 6, global_batch_size: 4, eval_every: 0, device: cpu,\n"
        f"  callbacks: ['{tmp_path}/breaks.py:Breaks']}}\n"
        f"checkpoint: {{every: 0, remote: 'file://{there}'}}\n"
    )
    command = [sys.executable, "-m", "threefold", "train", str(file), "--run-dir", str(run)]
    done = ready.run(command, timeout=100)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(
        f"Error: The last checkpoint could not be copied in 4 attempts, but {path_of(run, 6)} is complete, and "
        f"--resume=auto copies it: checkpoint.remote is file://{there}, which cannot be "
    )
    assert "training continues" not in done.stdout
    there.unlink()
    done = ready.run([*command, "--resume=auto"], timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{path_of(run, 6)} was not at file://{there} yet; it has been copied there.\n" in done.stdout
    assert done.stdout.endswith("nothing left to do.\n")
    assert sorted(path.name for path in there.iterdir()) == [OWNER_FILE, "step_00000006"]
