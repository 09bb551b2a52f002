"""`threefold parity` on runs of `threefold train`: layouts are equal, and a mistake put into one is named."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.parity_command import parity
from tests.support.sweep import sweep
from tests.support.words import words
from tests.train.support import write_ids
from threefold_parity.record import INITIAL, OUTPUT, Record

CONFIG = """
data: {path: tokens, sequence_length: 16, split: "90,10"}
model: {num_layers: 4, hidden_size: 32, num_attention_heads: 4, ffn_hidden_size: 36, vocab_size: 61}
train: {max_steps: 4, global_batch_size: 8, device: cpu, seed: 3}
optimizer: {lr: 3.0e-3}
"""
LLAMA = "model.architecture=llama model.num_key_value_heads=2 model.ffn_hidden_size=36"
LAYOUTS = {
    "dp, tp and sp": ("parallel.dp=2 parallel.tp=2 parallel.sequence_parallel=true", ""),
    "pp, interleaved, tied": ("parallel.pp=2 parallel.schedule=interleaved train.micro_batch_size=2", ""),
    "cp and ZeRO 3": ("parallel.dp=2 parallel.cp=2 parallel.zero=3", ""),
    "hybrid ZeRO 2 in bf16": ("parallel.dp=4 parallel.zero=2 parallel.zero_shards=2", "precision.dtype=bf16"),
    "llama: ring, tp and recompute": (
        "parallel.cp=2 parallel.cp_method=ring parallel.tp=2 train.recompute=full",
        f"{LLAMA} model.tie_embeddings=false",
    ),
    "experts": (
        "parallel.dp=2 parallel.ep=2 parallel.tp=2",
        f"{LLAMA} model.num_experts=4 model.experts_per_token=2",
    ),
}
MISTAKES = {
    "gradients of norms not summed over tp": (
        "import threefold.train.step as step\nstep.partial_over_tensor_ranks = lambda model: []\n",
        "differs from rank to rank, and the sum over ranks would be right",
    ),
    "the loss divided by this replica's tokens": (
        "import threefold.train.step_batch as step_batch\n"
        "of_tokens = step_batch.BatchPreparation.of_tokens\n"
        "def wrong(self, *arguments):\n"
        "    local, facts = of_tokens(self, *arguments)\n"
        "    return local, facts._replace(factor=facts.factor * self.mesh.dp.size)\n"
        "step_batch.BatchPreparation.of_tokens = wrong\n",
        ": 2 (dp or tp) times.",
    ),
    "another learning rate": (
        "import threefold.train.step as step\nrate = step.learning_rate\n"
        "step.learning_rate = lambda *arguments: 1.01 * rate(*arguments)\n",
        "the learning rate of",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recorded")
    tokenizer = words(61)
    write_ids(made / "tokens", np.random.default_rng(0).integers(1, 61, (30, 64)).tolist(), tokenizer, eod=0)
    (made / "run.yaml").write_text(CONFIG, encoding="utf-8")
    return made


def command(settings: str) -> str:
    return " ".join(["threefold train run.yaml --run-dir {run}", *(f"--set {each}" for each in settings.split())])


@sweep("layout", LAYOUTS, slow=(0,))
def test_layouts_of_a_run_are_equal(layout: str, folder: Path, tmp_path: Path) -> None:
    settings, common = LAYOUTS[layout]
    runs = ("--reference", command(common), "--candidate", command(f"{common} {settings}"))
    ended = parity("run", *runs, "--steps", "2", "--out", str(tmp_path / "out"), folder=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Equal up to rounding in 2 steps" in ended.stdout
    assert "2 runs with noise and one in fp64" in ended.stdout
    assert "not compared everywhere" not in ended.stdout
    assert re.search(r"seen of an epoch of \d+ steps: 1 to 2, not its last batch", ended.stdout)

    ours, theirs = (Record(tmp_path / "out" / name) for name in ("reference", "candidate"))
    got, expected = theirs.step(1), ours.step(1)
    weights = [key for key in expected if key[0] == INITIAL]
    assert all(got[key].missing == 0 for key in weights)
    outputs = {key[1] for key in expected if key[0] == OUTPUT}
    assert {"blocks.0", "blocks.3.attn.proj", "embed", "head.norm"} <= outputs


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_layout_is_named(mistake: str, folder: Path, tmp_path: Path) -> None:
    text, said = MISTAKES[mistake]
    (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
    wrong = f"env PYTHONPATH={tmp_path} " + command("parallel.dp=2 parallel.tp=2 parallel.sequence_parallel=true")
    runs = ("--reference", command(""), "--candidate", wrong)
    ended = parity("run", *runs, "--steps", "1", "--noise", "1", folder=folder)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert said in ended.stdout.splitlines()[1]


@pytest.mark.sweep
def test_a_run_that_goes_on_in_another_layout_beside_an_unbroken_one(folder: Path, tmp_path: Path) -> None:
    fixed = "optimizer.decay_steps=8 optimizer.warmup_steps=1 train.max_steps={} checkpoint.every=2"
    first = f"threefold train run.yaml --run-dir {tmp_path / 'half'}"
    settings = [f"--set {each}" for each in fixed.format(2).split()]
    subprocess.run([sys.executable, "-m", *" ".join([first, *settings]).split()], cwd=folder, check=True, timeout=300)
    saved = tmp_path / "half"

    def beside(candidate: str, name: str) -> "subprocess.CompletedProcess[str]":
        shutil.copytree(saved, tmp_path / name)
        runs = ("--reference", command(fixed.format(6)), "--candidate", candidate.replace("half", name))
        return parity("run", *runs, "--after", "2", "--steps", "2", "--noise", "1", folder=folder)

    on = " ".join([first, "--resume", *(f"--set {each}" for each in f"{fixed.format(6)} parallel.tp=2".split())])
    ended = beside(on, "equal")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Equal up to rounding in 2 steps" in ended.stdout
    ended = beside(f"{on} --set train.seed=4", "other")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "train.seed is 4 but" in ended.stderr
    ended = beside(f"{on} --set optimizer.lr=0.00303", "rate")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "the learning rate of" in ended.stdout
