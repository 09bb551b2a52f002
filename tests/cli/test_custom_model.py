"""A user's own model in the commands: train, size, resume in another layout, generate, evaluate and export."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import custom_token_model, ready
from tests.support.command import Command
from tests.train.support import steps_of

FILE = Path(custom_token_model.__file__)
CONFIG = """\
data: {{path: {tokens}, sequence_length: 16, split: "80,20"}}
train: {{max_steps: 4, global_batch_size: 8, eval_every: 0, device: cpu}}
optimizer: {{lr: 1e-2, eps: 1e-5, warmup_steps: 1, decay_steps: 20}}
checkpoint: {{every: 2}}
"""


IMPORTS = """\
from tiny_layers import HEAD, Block, Embed, Head
from torch import Tensor, nn

from threefold import Column, Plan, Replicated, Row, Vocab


"""


def command(*arguments: str | Path) -> str:
    done = ready.run([sys.executable, "-m", "threefold", *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, and a run of two layouts that no longer has the model's file and the module beside it."""
    folder = tmp_path_factory.mktemp("own")
    config, file, run = folder / "own.yaml", folder / "mine.py", folder / "run"
    config.write_text(CONFIG.format(tokens=tokens))
    layers, model = FILE.read_text().split("class Tiny")
    beside = folder / "tiny_layers.py"
    beside.write_text(layers)
    file.write_text(f"{IMPORTS}class Tiny{model}")
    own = ("--model", f"{file}:Tiny")
    command("train", config, *own, "--run-dir", folder / "alone")
    command("train", config, *own, "--run-dir", run, "--set", "parallel.tp=2", "--set", "train.max_steps=2")
    file.unlink()
    beside.unlink()
    layout = ("--set", "parallel.pp=2", "--set", "parallel.dp=2", "--set", "parallel.tp=1")
    command("train", config, "--run-dir", run, "--resume", "--trust-code", *layout)
    return folder


@pytest.mark.slow
def test_a_run_resumes_in_another_layout_without_its_file(trained: Path) -> None:
    alone, run = ([step["loss"] for step in steps_of(trained / name).values()] for name in ("alone", "run"))
    assert len(alone) == 4
    assert run == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_it_generates_the_same_in_every_layout(trained: Path) -> None:
    given = ("--prompt", "The with", "--prompt", "a", "--max-new-tokens", "20", "--dtype", "fp64")
    given = (*given, "--trust-code")
    alone = command("generate", trained / "run", *given)
    assert len(alone) > len("The with")
    assert command("generate", trained / "run", *given, "--tp", "2", "--pp", "2") == alone


@pytest.mark.slow
def test_it_is_exported_for_plain_torch(trained: Path, threefold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    out = trained / "exported"
    ended = threefold("checkpoint", "export", trained / "run", "--out", out, "--trust-code")
    assert ended.status == 0, ended.error
    made = json.loads((out / "model.json").read_text())
    assert (made["file"], made["name"], made["tied"]) == (
        "model.py",
        "Tiny",
        {"head.output.weight": "embed.tokens.weight"},
    )
    monkeypatch.syspath_prepend(out)
    spec = spec_from_file_location("exported", out / made["file"])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    model = getattr(module, made["name"])(**made["arguments"])
    left = model.load_state_dict(load_file(out / "model.safetensors"), strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["head.output.weight"], [])
    ids = torch.tensor([[1, 2, 3]])
    assert torch.isfinite(model(ids)).all()
    assert "own model" in ended.output


@pytest.mark.slow
def test_mistakes_of_the_option_are_one_sentence(trained: Path, threefold: Command) -> None:
    config, other = trained / "own.yaml", trained / "other"
    other.mkdir()
    (other / "model.py").write_text(FILE.read_text())
    (other / "main.py").write_text("from model import Tiny")
    for command_line, sentence in (
        (
            ("train", config, "--model", f"{other}/main.py:Tiny", "--run-dir", other),
            "main.py imports model.py beside it",
        ),
        (("train", config, "--model", "nowhere.py"), "--model is nowhere.py but nowhere.py is not a file; name a"),
        (("config", "size", config, "--model", FILE, "--set", "model.arguments={bloks: 2}"), "the nearest is blocks."),
        (
            ("generate", trained / "run", "--trust-code", "--tp", "4", "--prompt", "a"),
            "--tp is 4 but must divide the 6 heads of",
        ),
        (("config", "size", config, "--set", "model.arguments={blocks: 2}"), "use architecture own or leave it out"),
    ):
        assert sentence in threefold(*command_line).refusal
    size = threefold("config", "size", config, "--model", FILE, "--set", "model.arguments={blocks: 2}")
    assert size.status == 0
    assert "Parameters: " in size.output
