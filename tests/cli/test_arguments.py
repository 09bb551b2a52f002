"""Wrong paths and options of commands that need torch are reported in a sentence, before torch is imported."""

import sys
from pathlib import Path
from shutil import copytree

import pytest

from tests.support import ready
from tests.support.command import ends_in_one_process

_ERRORS = {
    "generate nowhere --prompt x": "nowhere has no complete checkpoint; give the run folder of `threefold train`.",
    "generate broken/step_00000001 --prompt x": "broken/step_00000001 is a checkpoint, and damaged (its config.yaml ",
    "eval run/checkpoints/step_00000001 --data a.txt": "step_00000001 has no complete checkpoint; give the run folder",
    "generate run --prompt x --tp 3": "--tp is 3 but must divide the model's num_attention_heads 4; use 2.",
    "generate run --prompt x --pp 9": "--pp is 9 but the model has 4 layers",
    "generate run --prompts-file no.txt": "--prompts-file is no.txt, which is not a file",
    "generate run --prompts-file empty.txt": "--prompts-file empty.txt has no prompt",
    "generate run --prompt x --system y": "--system goes only with --chat; give both, or leave --system out.",
    "generate run --prompt x --model no.py": "--model is no.py but no.py is not a file",
    "eval nowhere --data a.txt": "nowhere has no complete checkpoint",
    "eval run --data no.txt": "--data is no.txt, which is not a file",
    "eval run --data a.txt --json no/a.json": "--json no/a.json cannot be written: no is not a folder; name",
    "eval run --data a.txt --json run": "--json run is a folder; name a file, such as run/metrics.json.",
    "eval run --data a.txt --json a.txt": "--json a.txt is the file of --data; name another.",
    "eval run --data a.txt --context 5000": "--context is 5000 but the model has 16 positions; use 16 at most.",
    "eval run --data a.txt --task lambada --stride 3": "--stride is 3 but --task lambada has one window per text;",
    "eval run --data a.txt --stride 0": "--stride is 0 but must be between 1 and the context, 16,",
    "eval run --data a.txt --stride 17": "as tokens between windows would be skipped; use 16.",
    "eval run --data a.txt --tp 3": "--tp is 3 but must divide",
    "checkpoint import no/such/model --out new": "no/such/model/config.json does not exist",
    "checkpoint import run --out new": "run/config.json does not exist",
    "checkpoint import other --out run": "--out run ",
    "checkpoint list nowhere": "nowhere is not there; the nearest run is ",
    "checkpoint show nowhere": "nowhere is not there; the nearest run is ",
    "checkpoint show a.txt": "a.txt is a file; the nearest run is ",
    "checkpoint verify nowhere": "nowhere is not there; ",
    "checkpoint convert nowhere --out new": "nowhere is not there; ",
    "checkpoint convert run --out new --shard-size much": "--shard-size 'much' is not a size such as 500MB or 5GB; use",
    "checkpoint average nowhere --latest 2 --out new": "nowhere is not there; ",
    "checkpoint export nowhere --out new": "nowhere has no complete checkpoint; give the folder of a run.",
    "checkpoint export run --out run": "--out run ",
    "checkpoint export run --out new --model no.py": "--model is no.py but no.py is not a file",
    "checkpoint export run --out new --shard-size 5apples": "--shard-size '5apples' is not a size such as 500MB",
    "checkpoint import s3://b/model --out new": "The model's folder is s3://b/model but must be a path on this machine",
    "checkpoint import hf://org/gpt2 --out new": "is a page of the Hugging Face hub; give the model's id, org/gpt2.",
    "plan run.yaml --gpus 2 --hardware s3://b/x.yaml": "The hardware entry is s3://b/x.yaml but must be a path on this",
    "inspect s3://b/model.py": "FILE.py is s3://b/model.py but must be a path on this machine",
    "init new.yaml --data nowhere": "data.path is nowhere, which does not exist",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> dict[str, tuple]:
    """How each command line ends, all in one process, which has imported what any of them has."""
    folder = tmp_path_factory.mktemp("arguments")
    (folder / "run.yaml").write_text(
        f"data: {{path: {tokens}, sequence_length: 16}}\n"
        "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n"
        "train: {max_steps: 1, global_batch_size: 4, eval_every: 0, device: cpu}\n"
    )
    trained = ready.run(
        [sys.executable, "-m", "threefold", "train", str(folder / "run.yaml"), "--run-dir", str(folder / "run")]
    )
    assert trained.returncode == 0, trained.stderr
    broken = copytree(folder / "run/checkpoints/step_00000001", folder / "broken/step_00000001")
    (broken / "config.yaml").write_text("{}")
    (folder / "empty.txt").touch()
    (folder / "a.txt").write_text("A text.")
    lines = [line.split() for line in _ERRORS]
    return dict(zip(_ERRORS, ends_in_one_process(lines, folder), strict=True))


@pytest.mark.parametrize("line", _ERRORS)
def test_a_wrong_argument_is_one_sentence_before_torch(told: dict[str, tuple], line: str) -> None:
    status, output, error, imported = told[line]
    assert (status, output) == (2, "")
    [sentence] = error.splitlines()
    assert sentence.startswith("Error: ")
    assert _ERRORS[line] in sentence
    assert "torch" not in imported
