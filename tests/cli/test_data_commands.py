"""The commands as a newcomer uses them, one after the other in an empty folder."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from threefold.cli.main import app
from threefold.config import Config
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.errors import UserError
from threefold.launch.checks import resolve_run


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["data", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("sample") / "corpus"
    return folder, run("sample", str(folder))


def test_mistakes_reach_the_command_line_as_user_errors(tmp_path: Path) -> None:
    for arguments in (["prepare", "gone.txt", "--out", str(tmp_path / "out")], ["show", str(tmp_path / "none")]):
        result = CliRunner().invoke(app, ["data", *arguments])
        assert isinstance(result.exception, UserError)


def test_the_command_line_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "tokenizers", "pydantic", "zstandard")
    code = f"import sys, threefold.cli.data; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_tokens_outside_the_vocabulary_are_told(sample: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a few words " * 40}) + "\n" + json.dumps({"text": "b"}))
    run("prepare", str(tmp_path / "a.jsonl"), "--out", str(out), "--vocab-size", "270", "--workers", "1")
    tokens = np.fromfile(out / "tokens.bin", dtype="<u2")
    place, rows = len(tokens) - 2, TokenFiles.open(out).vocab_size  # the only token of the second document
    tokens[place] = rows + 7
    tokens.tofile(out / "tokens.bin")
    expected = (
        rf"tokens.bin holds token {rows + 7} at position {place} \(document 1\), outside the vocabulary of {rows}"
    )
    with pytest.raises(UserError, match=expected):
        run("show", str(out))


def test_what_a_corpus_of_one_document_is_told_works(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a few words and others " * 400}))
    out = tmp_path / "tokens"
    run("prepare", str(tmp_path / "a.jsonl"), "--out", str(out), "--vocab-size", "270", "--workers", "1")
    config = {
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
        "data": {"path": str(out), "sequence_length": 8},
        "train": {"max_steps": 2, "global_batch_size": 2, "eval_every": 1, "device": "cpu"},
    }
    assert resolve_run(Config.model_validate(config)).data.split == "949,50,1"  # the document is cut
    shown = [line.split()[:3] for line in run("show", str(out), "--split", "8,2").splitlines() if line.strip()]
    (train, valid) = (next(row for row in shown if row[:2] == [name, "1"]) for name in ("train", "valid"))
    assert int(train[2].replace(",", "")) == pytest.approx(4 * int(valid[2].replace(",", "")), abs=5)
    config["data"]["split"] = "949,0,0"
    with pytest.raises(UserError, match=r"prepare more documents, or set train.eval_every to 0"):
        resolve_run(Config.model_validate(config))
    config["train"]["eval_every"] = 0
    assert resolve_run(Config.model_validate(config)).data.split == "949,0,0"
    assert "949,0,0" not in run("show", str(out), "--split", "949,0,0")
