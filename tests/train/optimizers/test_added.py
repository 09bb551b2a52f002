"""An optimizer of another package: one file and an entry point, and it trains, shards, resumes and verifies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.plugin_package import write_package
from threefold.checkpoint.errors import MODEL, OPTIMIZER
from threefold.checkpoint.folder import newest
from threefold.checkpoint.tensors import load_tensors, stored_tensors

TOY = '''
"""RMSprop whose steps shrink with their number."""

import torch

from threefold.train.optim import UpdateRule


class Toy(UpdateRule):
    reads = {"eps": None, "momentum": 0.9}

    def __init__(self, entries, config):
        super().__init__(entries, config)
        self.states = {
            entry.name: {"count": torch.zeros(()), "squares": torch.zeros_like(entry.master)} for entry in self.entries
        }

    def step(self, lr):
        for entry in self.entries:
            state, gradient = self.states[entry.name], entry.gradient
            state["count"] += 1
            state["squares"].mul_(self.config.momentum).addcmul_(gradient, gradient)
            entry.master.mul_(1 - lr * self.weight_decay(entry))
            step = lr / (1 + 0.1 * float(state["count"]))
            entry.master.addcdiv_(gradient, state["squares"].sqrt() + self.config.eps, value=-step)

    def state(self, entry):
        return self.states[entry.name]

    @classmethod
    def states_per_element(cls, config, is_hidden_matrix):
        return 1
'''


def threefold(folder: Path, *arguments: str | Path) -> str:
    """What a command prints that finds the toy's package."""
    ended = subprocess.run(
        [sys.executable, "-m", "threefold", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def tensors(run: Path) -> dict[str, Tensor]:
    """All of the newest checkpoint."""
    checkpoint = newest(run)
    assert checkpoint is not None
    stored = stored_tensors(checkpoint.path).items()
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored}
    load_tensors(found, checkpoint.path, alone=True)
    return found


@pytest.mark.slow
def test_optimizer_of_another_package(tmp_path: Path, tokens: Path) -> None:
    package = write_package(tmp_path / "site", "threefold.optimizers", {"toy": "toy_package:Toy"}, TOY)
    config = tmp_path / "toy.yaml"
    config.write_text(
        f"data: {{path: {tokens}, sequence_length: 16}}\n"
        "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, hidden_dropout: 0.1}\n"
        "train: {max_steps: 6, global_batch_size: 8, eval_every: 0, device: cpu}\n"
        "precision: {dtype: fp64}\n"
        "optimizer: {name: toy, lr: 0.01, eps: 1.0e-4, warmup_steps: 1}\n"
    )
    one, many = tmp_path / "one", tmp_path / "many"
    threefold(package, "train", config, "--run-dir", one)
    layout = ("--set", "parallel.dp=2", "--set", "parallel.tp=2", "--set", "parallel.pp=2")
    half = ("--set", "train.max_steps=3", "--set", "optimizer.decay_steps=6")
    threefold(package, "train", config, "--run-dir", many, *layout, *half)
    other = ("--set", "parallel.dp=2", "--set", "parallel.zero=3", "--set", "parallel.tp=2")
    threefold(package, "train", config, "--run-dir", many, "--resume", *other)
    got, expected = map(tensors, (many, one))
    assert set(got) == set(expected)
    squares = {name for name in got if name.startswith(OPTIMIZER) and name.endswith(".squares")}
    assert len(squares) == len([name for name in got if name.startswith(MODEL)]) > 20
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-12 * max(1e-3, float(tensor.abs().max())))


@pytest.mark.slow
def test_verify_knows_it(tmp_path: Path) -> None:
    package = write_package(tmp_path / "site", "threefold.optimizers", {"toy": "toy_package:Toy"}, TOY)
    config = tmp_path / "toy.yaml"
    config.write_text(
        "data: {path: unused, sequence_length: 12}\n"
        "model: {num_layers: 2, hidden_size: 16, num_attention_heads: 4, vocab_size: 67}\n"
        "optimizer: {name: toy}\n"
    )
    printed = threefold(package, "verify", config, "--layouts", "tp2", "--dtype", "fp64")
    assert "toy, eps 1e-05" in printed
