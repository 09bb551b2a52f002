"""`threefold init`: the config that it writes runs, every wrong answer has one sentence, and nothing is overwritten."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import ready
from threefold.config import load_config
from threefold.data.preparation import prepare
from threefold.planner.commands.init import COMMENTS, QUESTIONS

COMMAND = [sys.executable, "-m", "threefold"]
TINY = ("--model", "2x32", "--steps", "2", "--batch", "4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tokens").symlink_to(tokens)
    return tmp_path


def test_what_it_writes_trains_as_it_is(threefold) -> None:
    status, output, error = threefold("init", "run.yaml", "--data", "tokens", *TINY, "--ranks", "2")
    assert (status, error) == (0, "")
    assert output == (
        "Wrote run.yaml: gpt, 2 layers of width 32, 2 ranks, 2 steps of 4 sequences of 256 tokens.\n"
        "Next: threefold train run.yaml\n"
    )
    config = load_config("run.yaml")
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (2, 32, 1)
    assert (config.parallel.dp, config.train.max_steps, config.train.global_batch_size) == (2, 2, 4)
    text = Path("run.yaml").read_text()
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(lines) == len(COMMENTS) - 1  # no preset
    for key, comment in COMMENTS.items():
        name = key.split(".")[1]
        assert name == "preset" or [line for line in lines if line.startswith(f"  {name}: ") and comment in line], key
    ended = ready.run([*COMMAND, "train", "run.yaml"])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert " at step 2\n" in ended.stdout
    assert Path("runs/run/checkpoints/step_00000002").is_dir()


def test_a_preset_is_written_by_its_name(threefold) -> None:
    options = ("--data", "tokens", "--model", "gpt2-124m", "--ranks", "8", "--steps", "1000")
    assert threefold("init", "run.yaml", *options)[::2] == (0, "")
    written = yaml.safe_load(Path("run.yaml").read_text())
    assert written["model"] == {"preset": "gpt2-124m"}
    assert (written["parallel"]["dp"], written["train"]["global_batch_size"]) == (8, 32)


def test_data_without_a_validation_part_is_not_evaluated(threefold, tokens: Path) -> None:
    Path("one.jsonl").write_text(json.dumps({"text": "One document, and no other. " * 100}))
    prepare((Path("one.jsonl"),), Path("one"), tokenizer=tokens / "tokenizer.json", workers=1)
    for data, evaluates in (("tokens", True), ("one", False)):
        assert threefold("init", f"{data}.yaml", "--data", data, *TINY)[::2] == (0, "")
        assert load_config(f"{data}.yaml").train.evaluates == evaluates


def test_a_file_is_never_overwritten(threefold) -> None:
    Path("run.yaml").write_text("mine\n")
    status, output, error = threefold("init", "run.yaml", "--data", "tokens")
    assert (status, output) == (2, "")
    assert error == "Error: run.yaml exists already; name another file, such as run-2.yaml.\n"
    assert Path("run.yaml").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("file", "options", "sentence"),
    [
        ("a.yaml", (), "--data is missing; give the tokens to train on, such as --data tokens, "),
        ("a.yaml", ("--data", "nowhere"), "data.path is nowhere, which does not exist in "),
        ("a.yaml", ("--data", "tokens", "--model", "gpt5"), "model.preset is 'gpt5' but must be one of gpt2-124m, "),
        (
            "a.yaml",
            ("--data", "tokens", "--model", "0x8"),
            "--model: the number of layers 0 must be at least 1; use 1.",
        ),
        ("a.yaml", ("--data", "tokens", "--ranks", "x"), "--ranks x must be a whole number; use 1."),
        ("a.yaml", ("--data", "tokens", "--steps", "0"), "--steps 0 must be at least 1; use 1."),
        ("a.yaml", ("--data", "tokens", "--ranks", "3", "--batch", "8"), "train.global_batch_size is 8 but must be a "),
        (".", ("--data", "tokens"), ". is a folder; name a file in it, such as run.yaml."),
        ("no/a.yaml", ("--data", "tokens"), "no/a.yaml cannot be written: there is no folder no; make it first."),
    ],
)
def test_a_wrong_answer_has_one_sentence(threefold, file: str, options: tuple[str, ...], sentence: str) -> None:
    status, output, error = threefold("init", file, *options)
    assert (status, output, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"Error: {sentence}")
    assert not list(Path().glob("*.yaml"))


def test_a_terminal_is_asked_until_each_answer_is_valid() -> None:
    terminal, theirs = os.openpty()
    process = subprocess.Popen(
        [*COMMAND, "init", "run.yaml", "--steps", "2"], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.write(terminal, b"nowhere\ntokens\ngpt5\n2x32\n2\n5\n4\n")
    told = b""
    try:
        while data := os.read(terminal, 4096):
            told += data
    except OSError:  # the process has ended
        pass
    assert process.wait() == 0, told
    text = told.decode()
    counts = {name: text.count(question) for name, question in QUESTIONS.items()}
    assert counts == {"data": 2, "model": 2, "ranks": 1, "steps": 0, "batch": 2}
    assert "data.path is nowhere, which does not exist" in text
    assert "train.global_batch_size is 5 but must be a multiple of parallel.dp 2; use " in text
    config = load_config("run.yaml")
    assert (config.data.path, config.model.num_layers, config.parallel.dp) == ("tokens", 2, 2)
    assert (config.train.max_steps, config.train.global_batch_size) == (2, 4)
