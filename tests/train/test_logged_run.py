"""The logged run of PaddleFleetX's GPT example, with its exact sizes: the same learning rates and range of losses."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from tests.train.support import write_ids
from threefold.config import Config, resolve
from threefold.launch import RankInfo, spawn
from threefold.train.entry_point import train

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


def random_tokens(folder: Path) -> Path:
    """As many random tokens as the run reads, in documents of a few samples each."""
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w1"))
    documents = np.random.default_rng(0).integers(1, VOCAB, (30, 4 * SEQUENCE))
    return write_ids(folder, documents.tolist(), tokenizer, eod=0)


def config_of_the_original(data: Path) -> Config:
    given = {
        "model": {
            "num_layers": 4,
            "hidden_size": 1024,
            "num_attention_heads": 2,
            "max_position_embeddings": 1024,
            "initializer_range": 0.02,
            "tie_embeddings": True,
        },
        "data": {"path": str(data), "sequence_length": SEQUENCE, "split": "1"},
        "parallel": {"dp": 2, "tp": 2, "pp": 2},
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "eval_every": 0,
            "device": "cpu",
        },
        "precision": {"dtype": "bf16"},
        "optimizer": {"lr": 1e-5, "warmup_steps": 3600, "decay_steps": 360_000},
        "checkpoint": {"every": 0},
        "log": {"every": 1},
    }
    return resolve(Config.model_validate(given), VOCAB)


def rank_main(_: RankInfo, config: Config, run_dir: Path) -> None:
    torch.set_num_threads(1)
    train(config, run_dir, False)


@pytest.mark.slow
def test_the_logged_run(tmp_path: Path) -> None:
    config = config_of_the_original(random_tokens(tmp_path / "tokens"))
    spawn(rank_main, (config, tmp_path / "run"), 8, run_dir=tmp_path / "run", start_method="spawn")
    log = (tmp_path / "run" / "train.log").read_text()
    rates = re.findall(r"learning rate: (\S+)", log)
    losses = [float(loss) for loss in re.findall(r" loss: (\S+),", log)]
    # The original printed the rate that its next step would use.
    assert rates[1:] == PRINTED_RATES
    assert len(losses) == STEPS
    assert all(abs(loss - 11.05) <= 0.08 for loss in losses), losses
