"""The logged run of PaddleFleetX's GPT example, with its exact sizes: the same learning rates and range of losses."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.words import words
from tests.train.support import steps_of, train, write_ids
from threefold.config import Config, resolve
from threefold.launch import RankInfo, spawn
from threefold.verify.worker_pool import WorkerPool

VOCAB, SEQUENCE, STEPS = 51200, 1024, 10
PRINTED_RATES = [
    "5.55556e-09",
    "8.33333e-09",
    "1.11111e-08",
    "1.38889e-08",
    "1.66667e-08",
    "1.94444e-08",
    "2.22222e-08",
    "2.50000e-08",
    "2.77778e-08",
]


RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"model": {}, "train": {}, "precision": {"dtype": "bf16"}},
    "original": {
        "model": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        "train": {"recompute": "full"},
        "precision": {"dtype": "fp16", "loss_scale": 32768.0},
    },
}
"""How the run is computed: as the original was, or in bf16 without dropout."""
SMALL = {"hidden_size": 64, "vocab_size": 509}
"""A sixteenth of the width."""


def random_tokens(folder: Path, vocab: int = VOCAB, sequence: int = SEQUENCE, used: int = VOCAB) -> Path:
    """As many random tokens as the run reads, of the vocabulary's first `used`, in documents of a few samples each."""
    tokenizer = words(vocab)
    documents = np.random.default_rng(0).integers(1, min(used, vocab), (30, 4 * sequence))
    return write_ids(folder, documents.tolist(), tokenizer, eod=0)


def config_of_the_original(
    data: Path,
    recipe: dict[str, dict[str, Any]],
    sequence: int = SEQUENCE,
    ways: int = 2,
    optimizer: dict[str, float] | None = None,
    **model: int,
) -> Config:
    """With `ways` ranks along each of the three axes, and other settings of the optimizer where they are given."""
    given: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": 4,
            "hidden_size": 1024,
            "num_attention_heads": 2,
            "max_position_embeddings": sequence,
            "initializer_range": 0.02,
            "tie_embeddings": True,
            **recipe["model"],
            **model,
        },
        "data": {"path": str(data), "sequence_length": sequence, "split": "1"},
        "parallel": {"dp": ways, "tp": ways, "pp": ways},
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "eval_every": 0,
            "device": "cpu",
            **recipe["train"],
        },
        "precision": recipe["precision"],
        "optimizer": {"lr": 1e-5, "warmup_steps": 3600, "decay_steps": 360_000, **(optimizer or {})},
        "checkpoint": {"every": 0},
        "log": {"every": 1},
    }
    return resolve(Config.model_validate(given), given["model"].get("vocab_size", VOCAB))


def rank_main(_: RankInfo, config: Config, run_dir: Path) -> None:
    torch.set_num_threads(1)
    train(config, run_dir, False)


def quietly(config: Config, run_dir: Path) -> None:
    """As a rank of the pool."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, run_dir, False)


def check_log(run_dir: Path, steps: int, theory: float, tolerance: float) -> None:
    """The rates that the original printed, and losses about that of a model which knows nothing."""
    log = (run_dir / "train.log").read_text()
    rates = re.findall(r"learning rate: ([\d.e+-]+)", log)
    losses = [float(loss) for loss in re.findall(r" loss: (\S+),", log)]
    # The original printed the rate that its next step would use.
    assert rates[1:] == PRINTED_RATES[: steps - 1]
    assert len(losses) == steps
    assert all(abs(loss - theory) <= tolerance for loss in losses), losses


def multiplies_fp16() -> bool:
    """Whether this CPU has instructions for matrix products in fp16; without, they are a hundred times slower."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and bool({"avx512_fp16", "amx_fp16", "asimdhp"} & set(flags.read_text().split()))


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_logged_run(tmp_path: Path, recipe: str) -> None:
    if recipe == "original" and not multiplies_fp16():
        pytest.skip("the 10 steps in fp16 would take this CPU, which has no such instructions, hours")
    config = config_of_the_original(random_tokens(tmp_path / "tokens"), RECIPES[recipe])
    spawn(rank_main, (config, tmp_path / "run"), 8, run_dir=tmp_path / "run", start_method="spawn")
    check_log(tmp_path / "run", STEPS, theory=11.05, tolerance=0.08)


@pytest.mark.slow
def test_the_recipe_of_the_logged_run_trains_as_in_fp32(pool: WorkerPool, tmp_path: Path) -> None:
    """At a rate of which the losses are seen to fall, as the original's first rates change no digit of them: then the
    gradients count, and with them the loss scale that they are divided by."""
    data = random_tokens(tmp_path / "tokens", SMALL["vocab_size"], 32, used=20)
    faster = {"lr": 5e-3, "warmup_steps": 2, "decay_steps": 20}
    steps = {"max_steps": 6}
    fp16 = RECIPES["original"] | {"train": {**RECIPES["original"]["train"], **steps}}
    fp32 = RECIPES["original"] | {"train": steps, "precision": {"dtype": "fp32"}}
    pool.run(8, quietly, config_of_the_original(data, fp16, 32, optimizer=faster, **SMALL), tmp_path / "run")
    pool.run(1, quietly, config_of_the_original(data, fp32, 32, 1, faster, **SMALL), tmp_path / "alone")
    ours, exact = (list(steps_of(tmp_path / name).values()) for name in ("run", "alone"))
    assert len(ours) == len(exact) == 6
    assert [(row["loss_scale"], row["skipped"]) for row in ours] == [(32768.0, False)] * 6
    assert exact[-1]["loss"] < exact[0]["loss"] - 0.5
    for row, right in zip(ours, exact, strict=True):
        assert row["loss"] != right["loss"]  # as it was computed in fp16
        assert row["loss"] == pytest.approx(right["loss"], rel=4e-3)
        assert row["grad_norm"] == pytest.approx(right["grad_norm"], rel=3e-2)
