"""A family of another package: one file and one entry point. It trains, is verified, imported and exported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.support.plugin_package import write_package
from tests.train.support import Run
from threefold.config.loading import load_config
from threefold.config.model import ModelConfig
from threefold.config.resolve import check_settings
from threefold.errors import UserError

GROUP = "threefold.model_families"
MODULE = '''
from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import nn

from threefold.config.model import ModelConfig
from threefold.models.plan import decoder_plan
from threefold.models.family import Family
from threefold.huggingface.mapping import HuggingFaceType, TensorNames
from threefold.huggingface.mapping import SourceRows, interleaved
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import NOTHING, Decoder, Embedding, Head, Linear
from threefold.models.sharding import AttentionCore, Column, Replicated, Row, Unit, Vocab, VocabLoss


class ToyConfig(ModelConfig):
    architecture: Literal["toy"] = "toy"
    slope: float = Field(default=0.5, ge=0)
    """Slope of the activation below zero."""


class Input(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens, samples=NOTHING):
        return self.tokens(tokens)


class Block(nn.Module):
    def __init__(self, config, name):
        super().__init__()
        self.head_dim = config.head_dim
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.core = CausalAttention(name=f"{name}.core")
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.up = Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.down = Linear(config.ffn_hidden_size, config.hidden_size, bias=False)
        self.act = nn.LeakyReLU(config.slope)

    def forward(self, x, samples=NOTHING):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, self.head_dim)).unbind(3)
        x = x + self.proj(self.core(q, k, v, samples))
        return x + self.down(self.act(self.up(x)))


class Toy(Decoder):
    def __init__(self, config):
        head = Head(nn.LayerNorm(config.hidden_size, bias=False), config.hidden_size, config.vocab_size)
        blocks = (Block(config, f"blocks.{layer}") for layer in range(config.num_layers))
        super().__init__(Input(config), blocks, head, config.tie_embeddings)


def plan(config, sequence_length):
    heads, d = config.num_attention_heads, config.head_dim
    inner = Unit("ffn_hidden_size", config.ffn_hidden_size)
    split = {
        "embed.tokens": Vocab(),
        "blocks.*.norm": Replicated(),
        "blocks.*.qkv": Column(Unit("num_attention_heads", heads, (("query", d), ("key", d), ("value", d)))),
        "blocks.*.core": AttentionCore(heads),
        "blocks.*.proj": Row(Unit("num_attention_heads", heads, (("head", d),))),
        "blocks.*.up": Column(inner),
        "blocks.*.down": Row(inner),
        "head.norm": Replicated(),
        "head.output": Column(),
        "head.loss.cross_entropy": VocabLoss(config.vocab_size),
    }
    plan = decoder_plan(config, split, [1] * config.num_layers)
    return replace(plan, recompute={"selective": ("blocks.*.core",), "full": ("blocks.*",)})


NAMES = TensorNames(
    outside={
        "embed.tokens.weight": "toy.tokens",
        "head.norm.weight": "toy.norm",
        "head.output.weight": "lm_head.weight",
    },
    in_block={"norm.weight": "norm", "proj.weight": "out", "up.weight": "up", "down.weight": "down"},
    block="toy.{}.",
)


class ToyType(HuggingFaceType):
    def read(self, given):
        return {
            "num_layers": given.whole("depth", least=1),
            "hidden_size": given.whole("width", least=1),
            "num_attention_heads": given.whole("heads", least=1),
            "ffn_hidden_size": given.whole("inner", least=1),
            "vocab_size": given.whole("vocab_size", least=1),
            "max_position_embeddings": given.whole("positions", least=1),
            "slope": float(given.number("slope", 0.5)),
            "tie_embeddings": given.flag("tie_word_embeddings"),
        }

    def write(self, model):
        return {
            "depth": model.num_layers,
            "width": model.hidden_size,
            "heads": model.num_attention_heads,
            "inner": model.ffn_hidden_size,
            "vocab_size": model.vocab_size,
            "positions": model.max_position_embeddings,
            "slope": model.slope,
            "tie_word_embeddings": model.tie_embeddings,
        }

    def rearranged(self, name, in_block, block, model, shapes, present):
        parts = [SourceRows(f"{block}{part}", model.head_dim) for part in ("q", "k", "v")]
        return [interleaved(name, shapes[name], parts)]


FAMILY = Family(
    title="Toy",
    config=ToyConfig,
    model="toy_package:Toy",
    plan="toy_package:plan",
    huggingface="toy_package:TYPES",
)
TYPES = (ToyType("toy", "toy", "ToyForCausalLM", NAMES, "toy."),)
'''
LACKS = "which has no such thing; use architecture"
CONFIG_JSON = {
    "model_type": "toy",
    "depth": 3,
    "width": 16,
    "heads": 4,
    "inner": 24,
    "vocab_size": 50,
    "positions": 32,
    "slope": 0.25,
    "tie_word_embeddings": False,
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "site", GROUP, {"toy": "toy_package:FAMILY"}, MODULE)


def threefold(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line with the package installed."""
    search = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "threefold", *arguments],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
    )


def write_config(folder: Path, run: Run) -> Path:
    sections = run.config.sections()
    for key in ("micro_batch_size", "gradient_accumulation_steps"):  # as the layout has them
        sections["train"].pop(key, None)
    model = {
        "architecture": "toy", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "slope": 0.25,
        "vocab_size": run.config.model.vocab_size,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**sections, "model": {k: v for k, v in model.items() if v is not None}}))
    return path


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_family_of_another_package_trains(small_run: Run, tmp_path: Path, package: Path) -> None:
    """In dp 2 · tp 2 · pp 2 with the losses of one process."""
    config = write_config(tmp_path, small_run.but(steps=2, dropout=0.0))
    for name, layout in (("one", {}), ("eight", {"dp": 2, "tp": 2, "pp": 2})):
        chosen = [argument for key, size in layout.items() for argument in ("--set", f"parallel.{key}={size}")]
        ended = threefold(package, "train", str(config), "--run-dir", str(tmp_path / name), *chosen)
        assert ended.returncode == 0, ended.stderr
    one = losses(tmp_path / "one")
    assert len(one) == 2
    assert losses(tmp_path / "eight") == pytest.approx(one, rel=1e-5)
    assert "slope: 0.25" in (tmp_path / "one" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_family_of_another_package_is_verified(small_run: Run, tmp_path: Path, package: Path) -> None:
    config = write_config(tmp_path, small_run.but(dropout=0.0))
    ended = threefold(package, "verify", str(config), "--layouts", "dp2·tp2·pp2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Toy" in ended.stdout


@pytest.mark.slow
def test_a_family_of_another_package_is_dry_run(small_run: Run, tmp_path: Path, package: Path) -> None:
    """A rank of each stage, with the parameters of its layers, half of each cut weight."""
    config = write_config(tmp_path, small_run.but(dropout=0.0))
    layout = [argument for axis in ("dp", "tp", "pp") for argument in ("--set", f"parallel.{axis}=2")]
    ended = threefold(package, "dry-run", str(config), "--json", "--all-stages", *layout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = -(-small_run.config.model.vocab_size // 2) * 16
    cut = 16 * (48 + 16 + 64 + 64) // 2
    held = {"embed": table, "blocks.0": 16 + cut, "blocks.1": 16 + cut, "head": 16 + table}
    ranks = json.loads(ended.stdout)["ranks"]
    assert [rank["parameters"] for rank in ranks] == [sum(held[layer] for layer in rank["layers"]) for rank in ranks]
    assert [layer for rank in ranks for layer in rank["layers"]] == list(held)


@pytest.mark.slow
def test_a_family_of_another_package_is_imported_and_exported(tmp_path: Path, package: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG_JSON))
    shapes = {"toy.tokens": (50, 16), "toy.norm": (16,), "lm_head.weight": (50, 16)}
    for layer in range(3):
        shapes |= {f"toy.{layer}.{name}": (16, 16) for name in ("q", "k", "v", "out")}
        shapes |= {f"toy.{layer}.norm": (16,), f"toy.{layer}.up": (24, 16), f"toy.{layer}.down": (16, 24)}
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, source / "model.safetensors")
    for arguments in (("import", str(source), "--out", "run"), ("export", "run", "--out", "back")):
        paths = [str(tmp_path / each) if each in ("run", "back") else each for each in arguments]
        ended = threefold(package, "checkpoint", *paths)
        assert ended.returncode == 0, ended.stderr
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    told = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: told[key] for key in CONFIG_JSON} == CONFIG_JSON


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"architecture": "toy", "slope": -1}, "model.slope is -1 but must be at least 0."),
        ({"architecture": "toy", "slop": 1}, "model.slop is not a setting; the nearest is model.slope."),
        ({"architecture": "toi"}, "own, toy; the nearest is toy."),
        ({"slope": 1.0}, f"is 1.0 but model.architecture is gpt, {LACKS} toy or leave it out."),
        ({"architecture": "toy", "qk_norm": True}, f"model.architecture is toy, {LACKS} llama or leave it out."),
    ],
)  # fmt: skip
def test_errors_about_its_settings(
    model: dict[str, object], sentence: str, tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "toy_package", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"data": {"path": "x"}, "model": model}))
    with pytest.raises(UserError) as error:
        check_settings(load_config(path))
    assert str(error.value).endswith(sentence)


def test_what_a_family_lacks_is_answered_by_the_base() -> None:
    """Any model may be asked for its key-value heads or experts; a family with such a setting has its own value."""
    gpt = ModelConfig.model_validate({"num_attention_heads": 4, "hidden_size": 64})
    llama = ModelConfig.model_validate({"architecture": "llama", "num_key_value_heads": 2, "num_experts": 8})
    assert (gpt.num_key_value_heads, gpt.head_dim, gpt.num_experts, gpt.has_experts(0)) == (4, 16, 0, False)
    assert (llama.num_key_value_heads, llama.num_experts, llama.has_experts(0)) == (2, 8, True)
