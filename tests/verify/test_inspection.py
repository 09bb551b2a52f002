"""`threefold.inspect`: what a model has, how it is cut, a proposed plan that works when it is pasted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import threefold as t3
from tests.api import custom_plain_model
from tests.api.custom_plain_model import Plain
from tests.support.command import Command
from tests.support.custom_token_model import Tiny
from threefold.verify.plan_check import check_plan

FILE = Path(custom_plain_model.__file__)
PROPOSED = """\
plan = t3.Plan(
    layers=["wte", "blocks.*", "mystery", "lm_head"],
    shard={
        "wte": t3.Vocab(),
        "blocks.*.attn.temperature": t3.Replicated(),  # undecided: a standalone parameter; replicated is right \
unless a cut layer's output meets it
        "blocks.*.attn.q": t3.Column(heads=4),
        "blocks.*.attn.k": t3.Column(heads=4),
        "blocks.*.attn.v": t3.Column(heads=4),
        "blocks.*.attn.proj": t3.Row(heads=4),
        "blocks.*.fc1": t3.Column(),
        "blocks.*.fc2": t3.Row(),
        "mystery": t3.Replicated(),  # undecided: its name says nothing
        "lm_head": t3.Vocab(),
    },
)"""


def test_a_plan_is_proposed_and_fits() -> None:
    found = t3.inspect(Plain, tp=4)
    assert found.proposal == PROPOSED
    assert found.undecided == ("blocks.*.attn.temperature", "mystery")
    names: dict[str, t3.Plan] = {}
    exec(PROPOSED, {"t3": t3}, names)
    with torch.device("meta"):
        model = Plain()
    check_plan(model, names["plan"].build(model))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_sizes_per_rank_are_those_of_the_cut() -> None:
    sizes = {
        each.pattern: (each.count, each.parameters, each.per_rank, each.rule)
        for each in t3.inspect(Plain, tp=4).modules
    }
    assert sizes["wte"] == (1, 41 * 20, 11 * 20, "Vocab")
    assert sizes["blocks.*.attn.q"] == (3, 3 * 400, 3 * 100, "Column by 4 heads")
    assert sizes["blocks.*.attn.proj"] == (3, 3 * 420, 3 * (100 + 20), "Row by 4 heads")
    assert sizes["blocks.*.fc1"] == (3, 3 * (37 * 20 + 37), 3 * (10 * 20 + 10), "Column")
    assert sizes["mystery"] == (1, 420, 420, "Replicated")


def test_a_model_with_a_plan_is_shown_with_it() -> None:
    found = t3.inspect(Tiny, arguments={"vocab_size": 37, "max_position_embeddings": 13})
    assert (found.proposal, found.undecided) == ("", ())
    text = str(found)
    assert "layers: embed, blocks.*, head" in text
    assert "embed.positions" in text


def test_a_tensor_axis_that_does_not_divide_the_heads() -> None:
    with pytest.raises(t3.UserError, match=r"tp is 3 but must divide the 4 heads of 'blocks.\*.attn.q'; use 2."):
        t3.inspect(Plain, tp=3)


def test_the_command_prints_the_same(threefold: Command) -> None:
    ended = threefold("inspect", f"{FILE}:Plain", "--tp", "4", "--set", "model.vocab_size=41")
    assert (ended.status, ended.error) == (0, "")
    assert ended.output.startswith("module ")
    assert ended.output.rstrip().endswith(PROPOSED)
    assert "undecided: mystery: its name says nothing." in ended.output
    wrong = threefold("inspect", f"{FILE}:Plane")
    assert wrong.status == 2
    assert wrong.error.count("\n") == 1


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3))
        self.classifier = nn.Linear(16, 10)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 12))
        self.patches = nn.Linear(27, 12)
        self.blocks = nn.ModuleList(EncoderBlock() for _ in range(2))
        self.head = nn.Linear(12, 10)


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.norm = nn.LayerNorm(12)
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.bias = nn.Parameter(torch.zeros(4, 9, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.items = nn.Sequential(nn.Embedding(70, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def gpt2(drop: float = 0.0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 50, "n_positions": 16}
    rates = {"embd_pdrop": drop, "attn_pdrop": drop, "resid_pdrop": drop}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates))


@pytest.mark.parametrize(
    ("model", "rules", "problem"),
    [
        (
            Convolutional,
            {"features.*": "Replicated", "classifier": "Replicated"},
            "'features.1' is a BatchNorm2d, which keeps statistics",
        ),
        (
            Encoder,
            {
                "class_token": "Replicated",
                "blocks.*.qkv": "Column in 3 groups by 4 heads",
                "blocks.*.proj": "Row by 4 heads",
                "blocks.*.bias": "Sharded of dim 0 by 4 heads",
                "blocks.*.norm": "Replicated",
            },
            "'class_token' is in none of the plan's layers",
        ),
        (TwoTowers, {"users.0": "Vocab", "items.0": "Vocab", "users.1": "Replicated"}, ""),
        (gpt2, {"transformer.wte": "Vocab", "transformer.wpe": "Replicated"}, ""),
        (
            lambda: gpt2(0.1),
            {"transformer.wte": "Vocab"},
            "'transformer.drop' is Dropout(p=0.1), which draws from torch's generator",
        ),
        (
            lambda: nn.Transformer(12, 2, 2, 2, 20, dropout=0.0),
            {
                "encoder.layers.*.self_attn": "Replicated",
                "encoder.layers.*.linear1": "Column",
                "decoder.layers.*.linear2": "Row",
                "decoder.layers.*.multihead_attn": "Replicated",
            },
            "",
        ),
    ],
    ids=["convolutional", "encoder", "two towers", "GPT-2", "GPT-2 that drops", "nn.Transformer"],
)
def test_models_of_any_kind(model: Callable[[], nn.Module], rules: dict[str, str], problem: str) -> None:
    found = t3.inspect(model)
    assert found.parameters == sum(parameter.numel() for parameter in model().parameters())
    assert rules.items() <= {each.pattern: each.rule for each in found.modules}.items()
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)
    names: dict[str, t3.Plan] = {}
    exec(found.proposal, {"t3": t3}, names)
    assert names["plan"].shard
    assert f"problem: {found.problem}" in str(found) or not found.problem


class Alternating(nn.Module):
    plan = t3.Plan(["0", "1", "2", "3"], {"0": t3.Column(), "1": t3.Row(), "2": t3.Column(), "3": t3.Row()})

    def __init__(self) -> None:
        super().__init__()
        for place in range(4):
            self.add_module(str(place), nn.Linear(6, 6, bias=False))


def test_a_row_has_what_is_cut_alike() -> None:
    found = t3.inspect(Alternating)
    assert [(each.pattern, each.rule, each.count, each.parameters, each.per_rank) for each in found.modules] == [
        ("*", "Column", 2, 72, 36),
        ("*", "Row", 2, 72, 36),
    ]
