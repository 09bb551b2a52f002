"""A run of a custom model checks its layout before its first step, in its own ranks, and remembers what it found."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support import custom_state_models
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, micro_batches, run_of, train
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.verify import rank_worker, run_verification
from threefold.verify.rank_worker import RankReport
from threefold.verify.run_verification import FILE, find_hidden_state, verify_run
from threefold.verify.worker_pool import WorkerError

ALONE = micro_batches(1)


def checked_rank(run: Run, folder: Path, resume: bool = False) -> str:
    """Train as `threefold train` does, with the check before the first step; returns what was printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(run.config, folder, resume, verify=verify_run)
    return printed.getvalue()


def refusal(pool, run: Run, folder: Path) -> str:
    """The sentence that ends a run before its first step."""
    with pytest.raises(WorkerError) as told:
        pool.run(run.world_size, checked_rank, run, folder)
    assert isinstance(told.value.error, UserError)
    assert not list((folder / "checkpoints").glob("*"))
    assert not (folder / "verify.partial").exists()
    return str(told.value.error)


def test_batch_norm_by_hand_is_refused_before_the_first_step(pool, tmp_path: Path) -> None:
    said = refusal(pool, run_of("batch norm by hand", dp=2, steps=1), tmp_path / "run")
    assert said.startswith(
        "custom_state_models.py:Model does not compute in dp 2 · tp 1 · pp 1 what it computes in one process: the "
        "first departure is the gradient of embed.weight, step 1 (dp replica 0 of 2, rank 0), by a relative error of "
    ), said
    assert said.endswith("`threefold verify` shows the others, and train.verify: false trains all the same.")
    [printed] = pool.run(1, checked_rank, run_of("batch norm by hand", steps=1, set=ALONE), tmp_path / "alone")
    assert "Verified 4 layers one by one against one process: 2 steps of 8 samples are equal" in printed
    off = run_of("batch norm by hand", dp=2, steps=1, set=(("train.verify", False),))
    pool.run(2, checked_rank, off, tmp_path / "off")
    assert len(losses_of(tmp_path / "off")) == 1


DEPARTING = {
    "running range": {"dp": 2},
    "batch norm by hand": {"set": micro_batches(4)},
    "unkeyed weights": {"dp": 2},
    "split statistics": {"tp": 2},
    "large batches": {"dp": 2, "set": (("train.global_batch_size", 8),)},
    "variance": {"dp": 2},
    "random": {"dp": 2},
    "F.dropout": {"tp": 2},
    "numpy": {"pp": 2},
    "counter": {},
    "gradients counter": {"set": ALONE},
    "backward counter": {"set": ALONE},
    "scaled gradients": {"set": ALONE},
    "first batch": {"set": ALONE},
    "late buffer": {"set": ALONE},
    "numbered": {"set": ALONE},
    "own forward": {"set": ALONE},
    "held tensor": {"set": ALONE},
    "kept tensor": {"set": ALONE},
}
"""Part of the model → the layout in which it is refused."""
SENTENCES = {
    "variance": "part.variance, step 1",
    "unkeyed weights": "the initial weight of blocks.0.part.gain (",
    "split statistics": "the gradient of embed.weight, step 1",
    "random": "custom_state_models.py:Model: 'blocks.0.part' draws from random, whose numbers depend on the layout",
    "F.dropout": "custom_state_models.py:Model: 'blocks.0.part' draws from torch, whose numbers depend on the layout",
    "numpy": "custom_state_models.py:Model: 'blocks.0.part' draws from numpy.random, whose numbers depend on the",
    "counter": "The attribute 'calls' of 'blocks.0.part' is not a buffer, forward changes it and the loss depends",
    "gradients counter": "The attribute 'calls' of 'blocks.0.part' is not a buffer, forward changes it and the loss",
    "backward counter": "The attribute 'calls' of 'blocks.0.part' is not a buffer, forward changes it and the loss",
    "scaled gradients": "Model has another loss, or other gradients, when the same samples go through it again",
    "first batch": "The attribute 'is_set' of 'blocks.0.part' is another one in a model that is made anew with",
    "late buffer": "forward makes 'blocks.0.part.size', which no optimizer, checkpoint or other rank knows; make it in",
    "numbered": "The attribute 'number' of 'blocks.0.part' is another one in a model that is made anew with",
    "own forward": "training calls the layers (embed … head) alone; move into a layer what forward does between them",
    "held tensor": "The attribute 'held' of 'blocks.0.part' is not a buffer, forward changes it and the loss depends",
    "kept tensor": "'blocks.0.part' keeps the tensor 'held' as a plain attribute",
}


@pytest.mark.parametrize("kind", DEPARTING)
def test_what_depends_on_the_layout_or_is_in_no_checkpoint_is_refused(pool, tmp_path: Path, kind: str) -> None:
    said = refusal(pool, run_of(kind, steps=1, **DEPARTING[kind]), tmp_path / "run")
    assert SENTENCES.get(kind, "does not compute in ") in said, said


class Root(torch.nn.Module):
    """Square root at 0, whose gradient is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.zeros(2))

    def forward(self) -> torch.Tensor:
        return (self.gain * 0).sqrt().sum()


def test_gradients_that_are_not_finite_equal_nothing() -> None:
    found = find_hidden_state(Root(), Root, lambda model: model())
    assert found.refusal.startswith("Root has a loss or gradients that are not finite with its initial weights")
    one, other = torch.tensor(1.0), torch.tensor([torch.nan])
    assert not run_verification._are_equal([one, other], [one, torch.zeros(1)])


EQUAL = {
    "plain": {"dp": 2, "set": (("parallel.zero", 3),)},
    "tracked": {"dp": 2, "tp": 2, "set": micro_batches(2)},
    "cached": {"tp": 2, "pp": 2},
    "numpy weights": {"set": micro_batches(2)},
    "drawn attributes": {"set": ALONE},
    "written data": {"dp": 2},
    "evaluated": {"pp": 2},
    "rotated": {"tp": 2},
}


@sweep("kind", list(EQUAL), quick=(0, 2, 4))
def test_a_layout_that_computes_what_one_process_does_is_verified_once(pool, tmp_path: Path, kind: str) -> None:
    run = run_of(kind, steps=1, **EQUAL[kind])
    printed, *_ = pool.run(run.world_size, checked_rank, run, tmp_path / "run")
    assert printed.count("against one process: 2 steps of ") == 1
    assert (tmp_path / "run" / FILE).exists()
    again, *_ = pool.run(run.world_size, checked_rank, run.but(steps=2), tmp_path / "run", True)
    assert "against one process" not in again
    assert not (tmp_path / "run" / "verify.partial").exists()


def test_an_exact_run_is_checked_up_to_rounding(pool, tmp_path: Path) -> None:
    run = run_of("plain", steps=1, dp=2, set=(("train.exact", True),))
    printed, *_ = pool.run(2, checked_rank, run, tmp_path)
    assert printed.count("against one process: 2 steps of ") == 1


def checked_behind_the_first(run: Run, folder: Path) -> str:
    """Train with a check whose folder is gone, as rank 0 removes it, when the ranks have met."""

    def run_rank(*args: Any, mesh: Mesh) -> RankReport:
        report = rank_worker.run_rank(*args, mesh=mesh)
        mesh.world.gather_objects(None)
        shutil.rmtree(folder / "verify.partial", ignore_errors=True)
        return report

    with patch.object(run_verification, "run_rank", run_rank):
        return checked_rank(run, folder)


def test_no_rank_reads_what_the_first_may_have_removed(pool, tmp_path: Path) -> None:
    printed, _ = pool.run(2, checked_behind_the_first, run_of("plain", dp=2, steps=1), tmp_path / "run")
    assert "against one process" in printed


def test_no_bit_of_the_run_depends_on_the_check(pool, tmp_path: Path) -> None:
    run = run_of("tracked", dp=2, steps=2)
    pool.run(2, checked_rank, run, tmp_path / "checked")
    pool.run(2, checked_rank, run.but(set=(("train.verify", False),)), tmp_path / "unchecked")
    assert losses_of(tmp_path / "checked") == losses_of(tmp_path / "unchecked")
    drawing = run_of("F.dropout", steps=2, set=ALONE)
    pool.run(1, seeded_rank, drawing, tmp_path / "one")
    pool.run(1, seeded_rank, drawing.but(set=(*ALONE, ("train.verify", False))), tmp_path / "two")
    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "two")


def seeded_rank(run: Run, folder: Path) -> None:
    torch.manual_seed(5)
    checked_rank(run, folder)


def of_file(kind: str, file: Path, **changes: object) -> Run:
    return run_of(kind, **changes).but(set=(("model.file", f"{file}:Model"), *dict(changes).get("set", ())))


@pytest.mark.slow
def test_an_edited_model_is_verified_again(pool, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(custom_state_models.__file__).read_text())
    run = of_file("plain", file, dp=2, steps=1)
    [printed, _] = pool.run(2, checked_rank, run, tmp_path / "run")
    assert "against one process" in printed
    edited = file.read_text().replace("return x * self.gain if", "return (x - x.mean(0)) * self.gain if", 1)
    assert edited != file.read_text()
    file.write_text(edited)
    with pytest.raises(WorkerError) as told:
        pool.run(2, checked_rank, run.but(steps=2), tmp_path / "run", True)
    assert "mine.py:Model does not compute in dp 2" in str(told.value.error)
    file.write_text(Path(custom_state_models.__file__).read_text() + "\n# Longer.\n")
    [printed, _] = pool.run(2, checked_rank, run.but(steps=2), tmp_path / "run", True)
    assert "against one process" in printed


def test_a_model_whose_package_is_edited_is_verified_again(pool, tmp_path: Path) -> None:
    """A function of a package beside the file, which the file imports."""
    (tmp_path / "custom_kit").mkdir()
    (kit := tmp_path / "custom_kit" / "gains.py").write_text("def gained(x, gain):\n    return x * gain\n")
    file = tmp_path / "packaged.py"
    text = Path(custom_state_models.__file__).read_text().replace("x * self.gain\n", "gained(x, self.gain)\n", 1)
    file.write_text(text.replace("import random\n", "import random\n\nfrom custom_kit.gains import gained\n", 1))
    for steps, (content, is_verified) in enumerate((("", True), ("", False), ("# Edited.\n", True)), start=1):
        kit.write_text(kit.read_text() + content)
        run = of_file("plain", file, dp=2, steps=steps)
        printed, _ = pool.run(2, checked_rank, run, tmp_path / "run", steps > 1)
        assert ("against one process" in printed) == is_verified


def test_numbers_without_an_effect_are_told_and_what_one_process_cannot_run_is_not_verified(
    pool, tmp_path: Path
) -> None:
    [printed] = pool.run(1, checked_rank, run_of("noted", steps=1), tmp_path / "noted")
    said = "The attribute 'calls' of 'blocks.0.part' is a number that forward changes and no checkpoint has:"
    assert said in printed
    assert "'last'" not in printed
    file = tmp_path / "mine.py"
    broken = "\n\ndef forward(self, *_):\n    raise RuntimeError('never whole')\n\n\nModel.forward = forward\n"
    file.write_text(Path(custom_state_models.__file__).read_text() + broken)
    [printed, _] = pool.run(2, checked_rank, of_file("plain", file, dp=2, steps=1), tmp_path / "run")
    assert "Not verified against one process: one process does not run it (RuntimeError: never whole)." in printed


def test_hooks_that_the_check_calls_too_are_told(pool, tmp_path: Path) -> None:
    """They may change what a layer computes, so that the check cannot leave them out."""
    file, text = tmp_path / "mine.py", Path(custom_state_models.__file__).read_text()
    norm = "        self.norm = nn.LayerNorm(WIDTH)\n"
    assert norm in text
    hook = "        self.norm.register_forward_hook(lambda *_: print(f'seen {torch.is_grad_enabled()}'))\n"
    file.write_text(text.replace(norm, norm + hook, 1))
    [printed] = pool.run(1, checked_rank, of_file("plain", file, steps=1), tmp_path / "run")
    said = "also call the hooks of blocks.0.norm, blocks.1.norm; if these count or log, set train.verify to false."
    assert said in printed
    off = of_file("plain", file, steps=1)
    [printed] = pool.run(1, checked_rank, off.but(set=(("train.verify", False),)), tmp_path / "off")
    assert said not in printed


def test_what_hooks_change_is_checked(pool, tmp_path: Path) -> None:
    """One process without them would compute another model than the run."""
    file, text = tmp_path / "mine.py", Path(custom_state_models.__file__).read_text()
    norm = "        self.norm = nn.LayerNorm(WIDTH)\n"
    hook = "        self.norm.register_forward_hook(lambda module, args, output: 1.5 * output + 0.25 * args[0])\n"
    file.write_text(text.replace(norm, norm + hook, 1))
    printed, _ = pool.run(2, checked_rank, of_file("plain", file, steps=1, dp=2), tmp_path / "run")
    assert "against one process: " in printed
    assert " are equal" in printed


def test_a_global_batch_that_is_too_large_is_said_to_be_untried(pool, tmp_path: Path) -> None:
    run = run_of("large batches", **DEPARTING["large batches"], steps=1)
    [printed, _] = pool.run(2, bounded_rank, run, tmp_path / "run", "MOST_POSITIONS", 100)
    assert "against one process: 2 steps of 4 samples are equal (" in printed
    assert "; the run's 8 would take one process long and were not tried; " in printed


def test_a_loss_that_calls_a_collective_is_not_verified(pool, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    call = "import torch.distributed as dist\n\ncomputed = loss\n\n\ndef loss(logits, batch):\n    dist.barrier()\n"
    text = Path(custom_state_models.__file__).read_text()
    file.write_text(f"{text}\n\n{call}    return computed(logits, batch)\n")
    [printed, _] = pool.run(2, checked_rank, of_file("plain", file, dp=2, steps=1), tmp_path / "run")
    said = "one process does not run it (RuntimeError: it calls a collective, which the other ranks do not)."
    assert f"Not verified against one process: {said}" in printed


@pytest.mark.parametrize(
    ("bound", "reason"),
    [("MOST_PARAMETERS", "the model has 1,458 parameters, more than 1"), ("MOST_WORK", "its 4 samples would take one")],
)
def test_what_is_too_large_is_not_verified(pool, tmp_path: Path, bound: str, reason: str) -> None:
    [printed, _] = pool.run(2, bounded_rank, run_of("plain", dp=2, steps=1), tmp_path / "run", bound)
    assert f"Not verified against one process: {reason}" in printed
    assert not (tmp_path / "run" / FILE).exists()


def bounded_rank(run: Run, folder: Path, bound: str, value: int = 1) -> str:
    from unittest import mock

    from threefold.verify import run_verification as module

    with mock.patch.object(module, bound, value):
        return checked_rank(run, folder)
