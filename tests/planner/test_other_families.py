"""Families of another package: the planner counts their weights and FLOPs, and plans or refuses their blocks."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.plugin_package import write_package
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.errors import UserError
from threefold.launch.checks import CheckedConfig
from threefold.models.family import make_model
from threefold.planner.block import BlockShape, block_shapes, describe_model
from threefold.planner.dry_run import dry_run, run_stages
from threefold.planner.estimate import estimate
from threefold.planner.hardware import find_hardware
from threefold.planner.model_size import ModelSize
from threefold.planner.planning import plan_layouts, read_request
from threefold.planner.stage_memory import stage_memory

MODULE = '''
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from threefold.config.model import ModelConfig
from threefold.models.family import Family
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import NOTHING, Decoder, Embedding, Head, Linear
from threefold.models.plan import decoder_plan
from threefold.models.sharding import AttentionCore, Column, Replicated, Row, Unit, Vocab, VocabLoss


class Input(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens, samples=NOTHING):
        return self.tokens(tokens)


class Attention(nn.Module):
    def __init__(self, config, name, gated):
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.qkv = Linear(hidden, 3 * hidden, bias=False)
        self.gate = Linear(hidden, hidden, bias=False) if gated else None
        self.core = CausalAttention(name=f"{name}.core")
        self.proj = Linear(hidden, hidden, bias=False)

    def forward(self, x, samples):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(3)
        out = self.core(q, k, v, samples)
        return self.proj(out * torch.sigmoid(self.gate(x)) if self.gate else out)


class Plain(nn.Module):
    """One norm, no biases, and a feed-forward network without a gate."""

    gated = False

    def __init__(self, config, name):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.attn = Attention(config, f"{name}.attn", self.gated)
        self.up = Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.down = Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x, samples=NOTHING):
        x = x + self.attn(self.norm(x), samples)
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Gated(Plain):
    gated = True


class Three(nn.Module):
    """Three matrices and no attention."""

    def __init__(self, config, name):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.up = Linear(config.hidden_size, config.ffn_hidden_size)
        self.down = Linear(config.ffn_hidden_size, config.hidden_size)
        self.mix = Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, samples=NOTHING):
        return x + self.mix(self.down(torch.relu(self.up(self.norm(x)))))


def family(name, block):
    class Settings(ModelConfig):
        architecture: Literal[name] = name

    class Model(Decoder):
        def __init__(self, config):
            blocks = (block(config, f"blocks.{layer}") for layer in range(config.num_layers))
            head = Head(nn.LayerNorm(config.hidden_size), config.hidden_size, config.vocab_size)
            super().__init__(Input(config), blocks, head, config.tie_embeddings)

    def plan(config, sequence_length):
        heads, d, inner = config.num_attention_heads, config.head_dim, Unit("ffn_hidden_size", config.ffn_hidden_size)
        attention = {
            "blocks.*.attn.qkv": Column(Unit("num_attention_heads", heads, (("query", d), ("key", d), ("value", d)))),
            "blocks.*.attn.core": AttentionCore(heads),
            "blocks.*.attn.proj": Row(Unit("num_attention_heads", heads, (("head", d),))),
        }
        gate = {"blocks.*.attn.gate": Column(Unit("num_attention_heads", heads, (("gate", d),)))}
        split = {
            "embed.tokens": Vocab(),
            "blocks.*.norm": Replicated(),
            "blocks.*.up": Column(inner),
            "blocks.*.down": Row(inner),
            **({"blocks.*.mix": Replicated()} if block is Three else attention),
            **(gate if block is Gated else {}),
            "head.norm": Replicated(),
            "head.output": Column(),
            "head.loss.cross_entropy": VocabLoss(config.vocab_size),
        }
        made = decoder_plan(config, split, [1] * config.num_layers)
        return replace(made, recompute={"full": ("blocks.*",)}) if block is Three else made

    globals().update({f"{name}_model": Model, f"{name}_plan": plan})
    return Family(title=name, config=Settings, model=f"three_families:{name}_model", plan=f"three_families:{name}_plan")


PLAIN, GATED, THREE = family("plain", Plain), family("gated", Gated), family("three", Three)
'''
HIDDEN, HEADS, INNER, LAYERS, VOCAB, LENGTH = 64, 4, 160, 3, 101, 96
MATRICES = {"plain": 4 * HIDDEN**2, "gated": 5 * HIDDEN**2, "three": HIDDEN**2}
"""Elements of a block's matrices besides those of the feed-forward network."""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {name: f"three_families:{name.upper()}" for name in MATRICES}
    folder = write_package(tmp_path, "threefold.model_families", entries, MODULE, "three_families")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "three_families", raising=False)


def sections(name: str, **parallel: Any) -> dict[str, dict[str, Any]]:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": INNER}
    return {
        "model": {"architecture": name, **sizes, "vocab_size": VOCAB, "tie_embeddings": False},
        "data": {"path": "unused", "sequence_length": LENGTH},
        "parallel": parallel,
        "train": {"global_batch_size": 4, "micro_batch_size": 2},
    }


def config(name: str, **parallel: Any) -> Config:
    return resolve(Config.model_validate(sections(name, **parallel)), VOCAB)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 3}], ids=["one rank", "tp pp"])
def test_weights_and_flops_are_those_of_the_modules(name: str, layout: dict[str, int]) -> None:
    given = config(name, **layout)
    with torch.device("meta"):
        model = make_model(given.model)
    size = ModelSize(given)
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    reports = run_stages(given)
    assert [report.parameters for report in reports] == [
        size.largest_rank(stage).parameters for stage in range(len(reports))
    ]
    products = LAYERS * (MATRICES[name] + 2 * HIDDEN * INNER) + HIDDEN * VOCAB
    attention = LAYERS * 2 * HIDDEN * LENGTH if name != "three" else 0
    found = describe_model(given.model, LENGTH).flops_per_token
    assert found == 6 * (products + attention)
    if not layout:
        # An attention kernel's backward pass multiplies once more than the formula counts: it computes scores again.
        assert reports[0].flops == 4 * LENGTH * (found + attention)


def test_flops_are_those_of_torchs_counter() -> None:
    given = config("three")
    with torch.device("meta"):
        model, tokens = make_model(given.model), torch.zeros(2, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        for layer in (*model.blocks, model.head.output):
            layer(torch.ones(2, LENGTH, HIDDEN, device="meta", requires_grad=True)).sum().backward()
    assert tokens.numel() * describe_model(given.model, LENGTH).flops_per_token == counter.get_total_flops()


def test_a_block_of_known_parts_is_planned() -> None:
    given = config("plain")
    assert set(block_shapes(describe_model(given.model, LENGTH))) == {
        BlockShape(hidden=HIDDEN, heads=HEADS, key_heads=HEADS, head_dim=HIDDEN // HEADS, ffn=INNER, norms=1)
    }
    [report], [memory] = run_stages(given), stage_memory(given, "cpu")
    assert memory.peak == pytest.approx(report.peak_bytes, rel=0.03)  # as of a GPT of this size
    assert estimate(given, find_hardware("h100")).fits
    request = read_request(config_of(sections("plain")), 2, find_hardware("h100"), "throughput", [])
    assert plan_layouts(request, lambda: 0.0).best.tokens_per_second > 0


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        ("gated", "attn.gate.weight and up.weight besides or for one of them"),
        ("three", "no attention of which the sharding plan names the queries, keys and values"),
    ],
)
def test_any_other_block_is_refused_in_a_sentence(name: str, lack: str) -> None:
    given, hardware = config(name), find_hardware("h100")
    for plan in (
        lambda: estimate(given, hardware),
        lambda: stage_memory(given),
        lambda: plan_layouts(read_request(config_of(sections(name)), 2, hardware, "throughput", []), lambda: 0.0),
    ):
        with pytest.raises(UserError, match=rf"^model.architecture is {name} but .* and blocks.0 has {lack}; use "):
            plan()
    assert dry_run(given).parameters == ModelSize(given).parameters


def test_a_run_of_any_family_has_a_default_micro_batch() -> None:
    for name in ("plain", "three"):
        given = config_of({**sections(name), "train": {"global_batch_size": 4, "device": "cpu"}})
        resolved = resolve(given, VOCAB)
        fitted = CheckedConfig(given, resolved, VOCAB, 0, 1).fitted()
        assert fitted.train.micro_batch_size == resolved.train.micro_batch_size == 4
