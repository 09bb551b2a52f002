"""The user's own two-tower model: sixty lines train and verify it, and the command trains, resumes and exports it."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import threefold as t3
from tests.support import ready
from tests.support.command import Command
from tests.train.support import losses_of, same, steps_of
from threefold.errors import UserError
from threefold.plugins import import_file
from threefold.verify.worker_pool import WorkerError, WorkerPool

FILE = Path(__file__).parents[2] / "examples" / "two_tower.py"


def script(file: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    return ready.run([sys.executable, file, folder], timeout=600)


def verdicts(printed: str) -> list[tuple[str, ...]]:
    return re.findall(r"^(dp2·tp2|tp2·pp2): (\w+), ", printed, re.MULTILINE)


@pytest.mark.slow
def test_sixty_lines_train_and_verify(tmp_path: Path) -> None:
    assert len(FILE.read_text().splitlines()) <= 60
    ended = script(FILE, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert verdicts(ended.stdout) == [("dp2·tp2", "equal"), ("tp2·pp2", "equal")]
    last = steps_of(tmp_path / "run")[16]
    assert f"step 16: match {last['terms']['match']:.4f}, size {last['terms']['size']:.4f}" in ended.stdout


@pytest.mark.slow
def test_a_model_that_depends_on_the_layout_is_found(tmp_path: Path) -> None:
    """Its scores have the mean over the samples of a micro-batch in them."""
    file = tmp_path / "wrong.py"
    file.write_text(FILE.read_text().replace("(encoded * new).sum(-1)", "(encoded * new).sum(-1) - new.mean()"))
    ended = script(file, tmp_path / "run")
    assert ended.returncode == 1, ended.stderr
    assert "what it computes in one process" in ended.stderr, "the run checks itself before its first step"
    assert verdicts(ended.stdout) == []


CONFIG = f"""\
data: {{path: "{FILE}:pairs", split: "80,19"}}
train: {{max_steps: 6, global_batch_size: 12, eval_every: 3, eval_batches: 1, device: cpu}}
precision: {{dtype: fp64}}
optimizer: {{name: "{FILE}:Soft", lr: 0.1, warmup_steps: 1, decay_steps: 20}}
"""


@pytest.mark.slow
def test_the_command_trains_resumes_exports_and_verifies_it(tmp_path: Path, threefold: Command) -> None:
    config, run, out = tmp_path / "two.yaml", tmp_path / "run", tmp_path / "out"
    config.write_text(CONFIG)
    own = ("--model", f"{FILE}:TwoTower")
    layouts = (
        (tmp_path / "alone", ()),
        (run, ("--set", "parallel.dp=2", "--set", "parallel.tp=2", "--set", "train.max_steps=3")),
        (run, ("--resume", "--set", "parallel.pp=2", "--set", "parallel.tp=2")),
    )
    for folder, options in layouts:
        command = [sys.executable, "-m", "threefold", "train", config, *own, "--run-dir", folder, *options]
        ended = ready.run(command)
        assert ended.returncode == 0, ended.stderr
    assert same(losses_of(run), losses_of(tmp_path / "alone"), "fp64")
    exported = threefold("checkpoint", "export", run, "--out", out, "--trust-code")
    assert exported.status == 0, exported.error
    made = json.loads((out / "model.json").read_text())
    model = import_file(out / made["file"]).TwoTower(**made["arguments"])
    assert model.load_state_dict(load_file(out / "model.safetensors"))
    left, right = (torch.stack([pair[side] for pair in import_file(FILE).pairs]) for side in ("left", "right"))
    assert torch.isfinite(model.towers[1](*model.towers[0](left, right))).all()
    command = [sys.executable, "-m", "threefold", "verify", config, "dp2·tp2", *own, "--json"]
    ended = ready.run(command)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["layouts"][0]["verdict"] == "equal"


def fitted(form: str, parallel: dict[str, int], folder: Path) -> None:
    """Train as a rank of the pool, the model given in one of its forms."""
    two = import_file(FILE)
    forms: dict[str, dict[str, Any]] = {
        "class": {"model": two.TwoTower, "loss": two.loss, "arguments": {"width": 12}},
        "partial": {"model": partial(two.TwoTower, width=12), "loss": two.loss},
        "file": {"model": f"{FILE}:TwoTower"},
        "layers": {"model": [partial(two.Tower, 51, 12), partial(two.Tower, 51, 12)], "loss": two.loss},
    }
    config = {
        "data": {"split": "80,19"},
        "parallel": parallel,
        "train": {"global_batch_size": 8, "eval_every": 0, "device": "cpu"},
        "precision": {"dtype": "fp64"},
    }
    trainer = t3.Trainer(config, run_dir=folder, optimizer=two.Soft, dataset=f"{FILE}:pairs", **forms[form])
    assert trainer.fit(max_steps=3) is None


@pytest.mark.slow
def test_every_form_of_a_model_is_the_same_one(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, fitted, "class", {}, tmp_path / "class")
    for form, parallel in (
        ("partial", {"dp": 2, "tp": 2}),
        ("file", {"tp": 2, "pp": 2}),
        ("layers", {"dp": 2, "pp": 2}),
    ):
        pool.run(4, fitted, form, parallel, tmp_path / form)
        assert same(losses_of(tmp_path / form), losses_of(tmp_path / "class"), "fp64")


NO_PARTS: dict[str, Any] = {"data": {"path": "unused"}}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"plan": t3.Plan(["a"])}, r"^plan is given without model; give the model too, or leave plan out\.$"),
        ({"loss": print}, r"^loss is given without model; give the model too, or leave loss out\.$"),
        ({"arguments": {"width": 3}}, r"^arguments is given without model, whose constructor takes them; give the"),
        ({"arguments": 3}, r"^arguments is 3 but must be a mapping from the names of the model's arguments"),
        ({"model": nn.Linear(2, 2)}, r"^model is a Linear but must be a class or a function that makes the model"),
        ({"model": nn.Linear, "loss": 3}, r"^loss is 3 but must be a function loss\(output, batch\)\.$"),
        ({"model": f"{FILE}:TwoTower", "loss": print}, r"and loss is given too; the file has it, so leave loss out\.$"),
        ({"model": []}, r"^layers is empty; give the model's layers in order\.$"),
        ({"config": {"train": 3}}, r"^config has 3 for train but must have a mapping of settings; use \{\}\.$"),
        ({"config": {"max_steps": 3}}, r"^config has 3 for max_steps but .*; use \{'train': \{'max_steps': 3\}\}\.$"),
        ({"dataset": DataLoader([3])}, r"^dataset is a DataLoader but must be the data set that it reads, as the run"),
    ],
)
def test_wrong_parts_of_a_run(arguments: dict[str, Any], sentence: str) -> None:
    for call in (t3.Trainer, t3.verify_model):
        with pytest.raises(UserError, match=sentence):
            call(**{"config": NO_PARTS, **arguments})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dtype": "bf16"}, r"^dtype is 'bf16' but must be fp64 or fp32; use fp64\.$"),
        ({"steps": 0}, r"^steps is 0 but must be a whole number of at least 1; use 3\.$"),
        ({"ranks": 1}, r"^ranks is 1 but must be a whole number of at least 2; use 4\.$"),
        ({"layouts": ["dp2·tq2"]}, r"tq2"),
        (
            {"model": nn.Identity, "loss": lambda output, batch: output},
            r"^Identity with its plan and loss cannot be sent",
        ),
    ],
)
def test_wrong_calls_of_verify_model(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        t3.verify_model(NO_PARTS, **arguments)


def verified(folder: Path) -> None:
    t3.verify_model({}, ["dp2"], model=f"{FILE}:TwoTower", dataset=f"{FILE}:pairs")


def test_a_rank_starts_no_verification(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"torch\.distributed is initialised in this process, so it cannot start"):
        pool.run(1, verified, tmp_path)
