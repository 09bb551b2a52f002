"""`threefold generate` and `threefold eval` as a user calls them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import ready
from tests.train.support import Run, train_rank
from threefold.checkpoint.folder import newest
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.huggingface.export_hf import Export, export_model
from threefold.inference.model import Trained
from threefold.output import SILENT
from threefold.verify.worker_pool import WorkerPool

LOCAL = ["-m", "threefold"]
PROMPTS = ("The statement", "If", "Classes are")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *LOCAL]


@pytest.fixture(scope="module")
def run(runs: Callable[[str], Path]) -> Path:
    return runs("learned")


def prompts_file(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("start", [LOCAL, TORCHRUN])
def test_same_text_from_one_process_and_from_two(threefold, run: Path, tmp_path: Path, start: list[str]) -> None:
    options = ["generate", str(run), "--prompts-file", str(prompts_file(tmp_path)), "--max-new-tokens", "4"]
    status, output, error = threefold(*options)
    assert (status, error) == (0, "")
    places = [output.index(prompt) for prompt in PROMPTS]
    assert places == sorted(places)
    assert output.endswith("\n")
    command = [sys.executable, *start, *options, "--tp", "2"]
    ended = (
        ready.run(command) if start == LOCAL else subprocess.run(command, text=True, capture_output=True, timeout=200)
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == output


def test_texts_are_kept_for_the_report(threefold, run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    options = ("generate", copy, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max-new-tokens", "4", "--keep")
    first, second = threefold(*options), threefold(*options)
    assert (first.status, first.error) == (0, "")
    lines = [json.loads(line) for line in (copy / "samples.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [*PROMPTS[:2], *PROMPTS[:2]]
    assert "\n".join(line["prompt"] + line["text"] for line in lines[:2]) + "\n" == first.output == second.output
    assert {line["step"] for line in lines} == {newest(run).step}
    (copy / "samples.jsonl").unlink()
    (copy / "samples.jsonl").mkdir()
    ended = threefold(*options)
    assert (ended.status, ended.error) == (
        2,
        f"Error: {copy / 'samples.jsonl'} cannot be written (Is a directory); generate without --keep.\n",
    )


def test_eval_prints_a_table_and_writes_json(threefold, run: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "a.jsonl", tmp_path / "out.json"
    data.write_text('{"text": "The statement returns a value."}\n\n{"text": "If not, an error is raised."}\n')
    (tmp_path / "out.json.partial").write_text("mine")
    (tmp_path / "link.json").symlink_to(out)
    status, output, error = threefold("eval", run, "--data", data, "--json", tmp_path / "link.json")
    assert (status, error) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "link.json", "out.json", "out.json.partial"]
    assert (tmp_path / "out.json.partial").read_text() == "mine"
    for wrong, problem in ((data, "is the file of --data"), (tmp_path, "is a folder")):
        status, _, error = threefold("eval", run, "--data", data, "--json", wrong)
        assert status == 2
        assert problem in " ".join(error.replace("│", " ").split())
    written = json.loads(out.read_text())
    assert (written["task"], written["texts"], written["context"], written["stride"]) == ("perplexity", 2, 16, 8)
    assert written["perplexity"] > 1
    lines = output.splitlines()
    assert "perplexity, context 16, stride 8" in lines[0]
    assert any(line.split()[:2] == ["perplexity", f"{written['perplexity']:,.4f}"] for line in lines)
    assert any("nats per token" in line for line in lines)
    status, output, _ = threefold("eval", run, "--data", data, "--task", "lambada")
    assert status == 0
    assert "last-word accuracy" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["generate", "--prompt", "a", "--tp", "3"],
            "--tp is 3 but must divide the model's num_attention_heads 4; use 2.",
        ),
        (["generate", "--prompt", ""], "--prompt is empty"),
        (["generate", "--prompts-file", "nowhere"], "--prompts-file is nowhere, which is not a file"),
        (["eval", "--data", "nowhere"], "--data is nowhere, which is not a file"),
        (["eval", "--data", __file__, "--stride", "99"], "--stride is 99 but must be between 1 and the context, 16"),
        (["eval", "--data", __file__, "--context", "99"], "--context is 99 but the model has 16 positions"),
        (["eval", "--data", __file__], "is of an unknown kind"),
    ],
)
def test_mistakes_are_one_sentence(threefold, run: Path, arguments: list[str], sentence: str) -> None:
    status, output, error = threefold(arguments[0], run, *arguments[1:])
    assert (status, output) == (2, "")
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert sentence in error


def test_a_folder_without_checkpoints(threefold, tmp_path: Path) -> None:
    for command in (["generate", tmp_path, "--prompt", "a"], ["eval", tmp_path, "--data", "a.jsonl"]):
        assert "has no complete checkpoint" in threefold(*command).error


def test_averaged_weights(threefold, pool: WorkerPool, small_run: Run, run: Path, tmp_path: Path) -> None:
    """Loaded in any layout and exported, and refused by name where there are none."""
    averaging = small_run.but(steps=3, set=(("optimizer.ema_decay", 0.9), ("model.vocab_size", None)))
    pool.run(1, train_rank, averaging, tmp_path / "run")
    path = newest(tmp_path / "run").path
    index = stored_tensors(path)
    held = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in index.items()}
    load_tensors(held, path, alone=True)
    for average, prefix in ((False, "model."), (True, "average.")):
        loaded = Trained.find(tmp_path / "run", average=average).load()
        for name, weight in loaded.stage.named_parameters():
            assert weight.equal(held[prefix + name])
        out = tmp_path / prefix
        export_model(Export(tmp_path / "run", out, average=average), SILENT)
        exported = load_file(out / "model.safetensors")
        assert exported["transformer.wte.weight"].equal(held[prefix + "embed.tokens.weight"])
    options = ("generate", tmp_path / "run", "--average", "--prompt", "The", "--max-new-tokens", "4")
    alone = threefold(*options)
    assert (alone.status, alone.error) == (0, "")
    for command in (("generate", run, "--prompt", "a"), ("checkpoint", "export", run, "--out", tmp_path / "hf")):
        ended = threefold(*command, "--average")
        assert ended.status == 2
        assert "has none; leave --average out, or train with optimizer.ema_decay 0.999" in ended.error
