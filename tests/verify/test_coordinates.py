"""`threefold coordinates`: activations of several widths, measured, printed and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import Command
from threefold.config import load_config
from threefold.errors import UserError
from threefold.models.family import make_model
from threefold.verify.coordinates import OUTPUTS, at_width, coordinates, parse_widths

MODEL = "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, vocab_size: 67"
LLAMA = "architecture: llama, num_key_value_heads: 2, ffn_hidden_size: 48"


def write(folder: Path, further: str = "", optimizer: str = "") -> Path:
    path = folder / "run.yaml"
    text = f"data: {{path: unused, sequence_length: 12}}\n{MODEL}{further and ', '}{further}}}\n"
    path.write_text(f"{text}optimizer: {{lr: 1.0e-2{optimizer and ', '}{optimizer}}}\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("further", "optimizer"), [("", ""), (LLAMA, ""), ("", "name: muon")], ids=["gpt", "llama", "muon"]
)
def test_activations_keep_their_size_with_mup_alone(tmp_path: Path, further: str, optimizer: str) -> None:
    found = coordinates(load_config(write(tmp_path, further, optimizer)), (32, 256), 4)
    assert max(found.growth(False, output) for output in OUTPUTS) > 3
    assert all(1 / 3 < found.growth(True, output) < 2 for output in OUTPUTS), found.sizes


def test_first_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    """Before an update, the logits of the plain model on the same tokens; the base with µP differs in scores alone."""
    from threefold.data.loader import BatchSlice
    from threefold.models.family import model_plan
    from threefold.verify.batches import RandomBatches
    from threefold.verify.reference import OneProcess

    given = load_config(write(tmp_path))
    found = coordinates(given, (32, 64), 1)
    config = at_width(given, 64, 32)
    assert (config.model.width, config.model.num_attention_heads, config.model.head_dim) == (2.0, 4, 16)
    run = OneProcess(lambda: make_model(config.model), model_plan(config.model, 12), config)
    tokens = RandomBatches().read(config, 0, BatchSlice(8, 0, 1)).tokens
    with torch.no_grad():
        logits = run.model(tokens)
    assert found.sizes[True, 64]["logits"][0] == pytest.approx(float(logits.abs().mean()), rel=1e-5)
    assert found.sizes[True, 32]["embedding"][0] == found.sizes[False, 32]["embedding"][0]


@pytest.mark.slow
def test_command(threefold: Command, tmp_path: Path) -> None:
    picture = tmp_path / "widths.png"
    arguments: tuple[Any, ...] = ("coordinates", write(tmp_path), "--widths", "64,32", "--steps", 1, "--out", picture)
    printed = threefold(*map(str, arguments))
    assert printed.status == 0, printed.output + printed.error
    assert "after 1 updates by adamw with the learning rate 0.01" in printed.output
    assert "with µP, width_base 32" in printed.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    document = json.loads(threefold(*map(str, arguments), "--json").output)
    assert [(run["mup"], run["width"]) for run in document["runs"]] == [
        (scaled, width) for scaled in (False, True) for width in (32, 64)
    ]
    assert all(len(run["mean_absolute"][output]) == 2 for run in document["runs"] for output in OUTPUTS)


@pytest.mark.parametrize("text", ["64", "64,64", "64,x", "0,64", "64,99999999"])
def test_wrong_widths(text: str) -> None:
    with pytest.raises(UserError, match=r"^--widths .* must be two or more numbers from 1 to 65,536, such as 64,128"):
        parse_widths(text)


def test_widths_that_a_model_cannot_have(tmp_path: Path) -> None:
    given = load_config(write(tmp_path, LLAMA))
    with pytest.raises(UserError, match=r"model\.ffn_hidden_size is 48 at model\.hidden_size 32, which at the width"):
        at_width(given, 33, 0)
    with pytest.raises(UserError, match=r"num_attention_heads is 4 but must divide model\.hidden_size 34"):
        at_width(load_config(write(tmp_path)), 34, 0)
    with pytest.raises(UserError, match=r"architecture is deepseek, which has no such thing"):
        at_width(load_config(write(tmp_path, "architecture: deepseek")), 64, 32)
