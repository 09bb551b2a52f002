"""A run that is watched: it ends with one sentence before a checkpoint is written of a wrong copy, and resumes."""

import sys
from pathlib import Path

import pytest

from tests.support import ready
from tests.train.support import Run, losses_of, train_rank
from threefold.checkpoint.folder import complete
from threefold.errors import HardwareFault
from threefold.verify.worker_pool import WorkerError, WorkerPool

FAULTY = '''
from pathlib import Path

import torch
import torch.distributed as dist


class Faulty(torch.optim.AdamW):
    """On rank 2 an update of one weight has a wrong bit, once, in step 5."""

    def __init__(self, params, lr, marker, weight_decay=0.0, eps=1e-8):
        super().__init__(params, lr=lr, weight_decay=weight_decay, eps=eps)
        self.marker, self.steps = Path(marker), 0

    def step(self, closure=None):
        super().step()
        self.steps += 1
        if self.steps == 5 and dist.get_rank() == 2 and not self.marker.exists():
            self.marker.touch()
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(torch.int32).view(-1)[7] ^= 1 << 9
'''


def watched(run: Run, tmp_path: Path, marker: Path, every: int) -> Run:
    (tmp_path / "faulty.py").write_text(FAULTY)
    optimizer = {
        "name": f"{tmp_path / 'faulty.py'}:Faulty",
        "lr": 1e-2,
        "warmup_steps": 2,
        "decay_steps": 20,
        "arguments": {"marker": str(marker)},
    }
    settings = (("train.watch_every", every), ("checkpoint.every", 2))
    return run.but(dp=4, steps=8, sections=(*run.sections, ("optimizer", optimizer)), set=settings)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_a_fault_ends_the_run_and_the_resumed_one_is_the_undisturbed(
    pool: WorkerPool, small_run: Run, tmp_path: Path, every: int
) -> None:
    """Also where no watch is due before the next checkpoint: that is not written of the wrong copy."""
    run = watched(small_run, tmp_path, tmp_path / "happened", every)
    with pytest.raises(WorkerError) as caught:
        pool.run(4, train_rank, run, tmp_path / "run")
    fault = caught.value.error
    assert isinstance(fault, HardwareFault)
    step = 5 if every == 1 else 6
    assert (fault.ranks, fault.step) == ((2,), step)
    good = tmp_path / "run" / "checkpoints" / "step_00000004"
    assert str(fault).startswith(f"After step {step} rank 2 has other bits in ")
    assert "than ranks 0, 1 and 3 with copies of the same" in str(fault)
    assert str(fault).endswith(f"--resume starts from {good}, from before it.")
    assert complete(tmp_path / "run")[-1].path == good

    pool.run(4, train_rank, run, tmp_path / "run", True)
    undisturbed = watched(small_run, tmp_path, tmp_path / "happened", 0)
    pool.run(4, train_rank, undisturbed, tmp_path / "undisturbed")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "undisturbed")


@pytest.mark.slow
def test_watched_gradients_change_no_loss_and_keep_checkpoints_until_they_agree(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    """A checkpoint after each of seven steps, of which the newest is kept, and gradients compared in every third."""
    run = small_run.but(dp=2, tp=2, steps=7, set=(("checkpoint.every", 1), ("checkpoint.keep", 1)))
    watched = run.but(set=(*run.set, ("train.watch_every", 3), ("train.watch", "gradients")))
    pool.run(4, train_rank, run, tmp_path / "run")
    pool.run(4, train_rank, watched, tmp_path / "watched")
    assert losses_of(tmp_path / "watched") == losses_of(tmp_path / "run")
    assert [checkpoint.step for checkpoint in complete(tmp_path / "run")] == [7]
    assert [checkpoint.step for checkpoint in complete(tmp_path / "watched")] == [6, 7]


@pytest.mark.sweep
def test_a_run_restarts_by_itself_from_before_the_fault(small_run: Run, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    run = watched(small_run, tmp_path, tmp_path / "happened", 2)
    config.write_text(run.but(set=(*run.set, ("train.max_restarts", 1))).config.to_yaml())
    command = [sys.executable, "-m", "threefold", "train", str(config), "--run-dir"]
    output = ready.run([*command, tmp_path / "run"], timeout=600)
    output.check_returncode()
    (line,) = [line for line in output.stdout.splitlines() if line.startswith("Restart 1 of 1")]
    assert "rank 2 has other bits in " in line
    assert "step_00000004" in line
    ready.run([*command, tmp_path / "undisturbed"], timeout=600).check_returncode()
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "undisturbed")
