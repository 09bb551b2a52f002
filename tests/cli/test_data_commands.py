"""The commands as a newcomer uses them, one after the other in an empty folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from threefold.cli.data import app
from threefold.config import Config
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.packed import PackedSamples, split_facts
from threefold.errors import UserError
from threefold.launch.training_run import resolve_run


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("sample") / "corpus"
    return folder, run("sample", str(folder))


@pytest.mark.slow
def test_the_sample_is_megabytes_of_english(sample: tuple[Path, str]) -> None:
    folder, output = sample
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert 1e6 < size < 2e7
    assert f"{size / 1e6:.1f} MB of English text" in output
    assert f"threefold data prepare {folder} --out" in output


@pytest.mark.slow
def test_the_sample_prepared_and_shown(sample: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    output = run("prepare", str(sample[0]), "--out", str(out), "--vocab-size", "2048")
    files = TokenFiles.open(out)
    assert f"{files.meta.tokens:,}" in output
    assert "2,048 tokens" in output
    assert files.meta.tokens > 300_000
    common = files.tokenizer.encode(" the of that is function returns").tokens
    assert common == ["Ġthe", "Ġof", "Ġthat", "Ġis", "Ġfunction", "Ġreturns"], "the vocabulary is English"

    shown = run("show", str(out), "--sequence-length", "64")
    assert "uint16" in shown
    assert "samples of 64" in shown
    first = PackedSamples.open(files, "train", "949,50,1", 64).read(np.array([0]))[0]
    assert files.tokenizer.decode(first.tolist(), skip_special_tokens=False) in shown
    for fact in split_facts(files, "949,50,1", 64):
        assert [fact.name, f"{fact.documents:,}", f"{fact.tokens:,}", f"{fact.samples:,}"] in map(
            str.split, shown.splitlines()
        )


def test_mistakes_reach_the_command_line_as_user_errors(tmp_path: Path) -> None:
    for arguments in (["prepare", "gone.txt", "--out", str(tmp_path / "out")], ["show", str(tmp_path / "none")]):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, UserError)


def test_the_command_line_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "tokenizers", "pydantic", "zstandard")
    code = f"import sys, threefold.cli.data; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_guides_python_example_runs(
    sample: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("prepare", str(sample[0]), "--out", "tokens", "--vocab-size", "300", "--workers", "1")
    guide = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    code = guide.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["batch"].tokens.shape == (16, 256)
    names["loader"].close()


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
    hint = r'prepare more documents, or set data.split to "949,0,0" and train.eval_every to 0'
    with pytest.raises(UserError, match=hint):
        resolve_run(Config.model_validate(config))
    config["data"]["split"] = "949,0,0"
    with pytest.raises(UserError, match=r"prepare more documents, or set train.eval_every to 0"):
        resolve_run(Config.model_validate(config))
    config["train"]["eval_every"] = 0
    assert resolve_run(Config.model_validate(config)).data.split == "949,0,0"
    assert "949,0,0" not in run("show", str(out), "--split", "949,0,0")
