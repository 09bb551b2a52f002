"""A token file that is cut short under a run, which is a real process of its own."""

import os
import sys
from pathlib import Path

import pytest

from tests.support import ready


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_a_token_file_that_is_cut_under_the_run(tokens: Path, tmp_path: Path, dp: int) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for file in tokens.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = {
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_attention_heads": 2,
        "data.path": folder,
        "data.sequence_length": 16,
        "train.max_steps": 1_000_000,
        "train.global_batch_size": 4,
        "train.eval_every": 0,
        "train.device": "cpu",
        "parallel.dp": dp,
        "log.every": 1,
    }
    config = tmp_path / "config.yaml"
    config.write_text("{}\n")
    arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "threefold", "train", config, "--run-dir", tmp_path / "run", *arguments]
    with ready.ReadyProcess(command) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "3/1,000,000  loss" in line:
                break
        os.truncate(folder / "tokens.bin", 40)
        _, error = run.communicate(timeout=300)
    assert run.returncode == 2, error
    assert error.count("\n") == 1, error
    assert f"{folder / 'tokens.bin'} holds 40 bytes and must hold" in error
