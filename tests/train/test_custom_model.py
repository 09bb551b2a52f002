"""A user's own model trains in any layout with the losses of one process, and resumes in another."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api import custom_plain_model
from tests.support import custom_token_model
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, train_rank
from tests.verify import custom_cut_model
from threefold.checkpoint.code import remembered_model
from threefold.checkpoint.folder import MODEL_FILE, newest
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.errors import UserError
from threefold.verify.worker_pool import WorkerError

FILE = Path(custom_token_model.__file__)


def custom_run(run: Run, file: Path = FILE, **changes: object) -> Run:
    own = (
        ("model.architecture", "own"),
        ("model.file", f"{file}:Tiny"),
        ("model.arguments", {"blocks": 3}),
    )
    return run.but(dropout=0.0, set=own, **changes)


@sweep(
    ("before", "after"),
    [({"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}), ({"tp": 2, "pp": 2}, {"dp": 4})],
    quick=(0,),
    ids=str,
)
def test_losses_are_those_of_one_process_and_a_run_resumes_in_another_layout(
    pool, small_run: Run, tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    run = custom_run(small_run, steps=6)
    [printed] = pool.run(1, train_rank, run, tmp_path / "alone")
    assert "Training 12,840 parameters" in printed
    alone = losses_of(tmp_path / "alone")
    assert alone[-1] < alone[0]
    first, second = run.but(steps=3, **before), run.but(**after)
    pool.run(first.world_size, train_rank, first, tmp_path / "run")
    pool.run(second.world_size, train_rank, second, tmp_path / "run", True)
    assert losses_of(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_has_the_file_of_its_model(pool, small_run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text())
    run = custom_run(small_run, file, steps=1)
    pool.run(1, train_rank, run, tmp_path / "run")
    checkpoint = newest(tmp_path / "run")
    assert checkpoint is not None
    copy = checkpoint.path / MODEL_FILE
    assert copy.read_text() == file.read_text()
    assert remembered_model(tmp_path / "run", trust_code=True) == f"{copy}:Tiny"
    file.write_text(f"# Changed.\n{FILE.read_text()}")
    [printed] = pool.run(1, train_rank, run.but(steps=2), tmp_path / "run", True)
    assert f"{file} has changed since {checkpoint.path}; it is used as it is now." in printed
    file.write_text(FILE.read_text().replace("inner: int = 25", "inner: int = 26"))
    with pytest.raises(WorkerError) as told:
        pool.run(1, train_rank, run.but(steps=3), tmp_path / "run", True)
    assert isinstance(told.value.error, UserError)
    assert "blocks.0.up.weight is 26 × 18 and the checkpoint's is 25 × 18; restore the file, or" in str(told.value)


@pytest.mark.slow
def test_a_model_without_anything_of_this_package_and_its_own_loss(pool, small_run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text(Path(custom_plain_model.__file__).read_text() + custom_plain_model.PLAN)
    own = (("model.architecture", "own"), ("model.file", f"{file}:Plain"), ("model.arguments", {"vocab_size": 301}))
    run = small_run.but(dropout=0.0, set=own)
    pool.run(1, train_rank, run, tmp_path / "alone")
    alone = losses_of(tmp_path / "alone")
    assert alone[-1] < alone[0]
    for layout in ({"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}):
        other = run.but(**layout)
        folder = tmp_path / "-".join(layout)
        pool.run(other.world_size, train_rank, other, folder)
        assert losses_of(folder) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_cuts_of_a_layer_and_of_standalone_parameters_resume_without_them(pool, small_run: Run, tmp_path: Path) -> None:
    """Queries, keys and values of one layer, and standalone parameters, from tp 2 to one rank, and to ZeRO."""
    own = (("model.architecture", "own"), ("model.file", f"{custom_cut_model.__file__}:Fused"))
    run = small_run.but(dropout=0.0, set=own, steps=4)
    pool.run(1, train_rank, run, tmp_path / "alone")
    pool.run(2, train_rank, run.but(steps=2, tp=2), tmp_path / "run")
    pool.run(1, train_rank, run.but(steps=3), tmp_path / "run", True)
    pool.run(2, train_rank, run.but(dp=2, set=(*own, ("parallel.zero", 3))), tmp_path / "run", True)
    assert len(losses_of(tmp_path / "alone")) == 4
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-5)


FROZEN = """
from tests.support.custom_token_model import Tiny as Whole


class Tiny(Whole):
    def __init__(self, vocab_size, max_position_embeddings, blocks=3):
        super().__init__(vocab_size, max_position_embeddings, blocks=blocks)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(("embed", "blocks.0")) and "norm" not in name)
"""


@sweep(
    ("before", "after"),
    [
        ({"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}),
        ({"pp": 4}, {"dp": 2, "set": (("parallel.zero", 3),)}),
        ({"dp": 2, "set": (("parallel.zero", 1),)}, {"dp": 2, "tp": 2}),
    ],
    slow=(0, 1),
    ids=str,
)
def test_a_run_with_frozen_weights_resumes_in_another_layout(
    pool, small_run: Run, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Its checkpoints have the frozen weights, as they were made, and no optimizer state of them."""
    (file := tmp_path / "frozen.py").write_text(FROZEN)
    run = custom_run(small_run, file, steps=4)
    pool.run(1, train_rank, run, tmp_path / "alone")
    changes = [{**each, "set": (*run.set, *each.get("set", ()))} for each in (before, after)]
    first, second = run.but(steps=2, **changes[0]), run.but(**changes[1])
    pool.run(first.world_size, train_rank, first, tmp_path / "run")
    pool.run(second.world_size, train_rank, second, tmp_path / "run", True)
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-5)
    saved = [newest(tmp_path / folder) for folder in ("alone", "run")]
    names = [{name: shape for name, (shape, _) in stored_tensors(each.path).items()} for each in saved if each]
    assert names[0] == names[1]
    assert "model.blocks.0.up.weight" in names[0]
    assert not any(name.startswith("optimizer.blocks.0") for name in names[0])
    wanted = [{"model.blocks.0.up.weight": torch.zeros(names[0]["model.blocks.0.up.weight"])} for _ in saved]
    for tensors, each in zip(wanted, saved, strict=True):
        assert each is not None
        load_tensors(tensors, each.path, alone=True)
    assert torch.equal(*(tensors["model.blocks.0.up.weight"] for tensors in wanted))
