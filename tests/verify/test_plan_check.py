"""Plans that do not fit their model: each is refused in a sentence that names what is wrong, or means what it says."""

# ruff: noqa: E501 a table of one-line sentences

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.presets import PRESETS
from threefold.config.resolve import resolve
from threefold.errors import UserError
from threefold.models.family import make_model, model_plan
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import CrossEntropy
from threefold.models.sharding import (
    AttentionCore,
    Column,
    Constant,
    ModelPlan,
    Normal,
    OverSequence,
    PerHead,
    Replicated,
    Row,
    Split,
    Vocab,
    VocabLoss,
)
from threefold.parallel.leaf import local
from threefold.parallel.parallelize import Parallelism, apply_parallelism
from threefold.parallel.pipeline.partition import StageMap
from threefold.verify.plan_check import check_plan
from threefold.verify.worker_pool import WorkerError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.core = CausalAttention()
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})

    def forward(self, x: Any, samples: Any = None) -> Any:
        return x + self.mlp["down"](self.mlp["up"](self.norm(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(8, 33, bias=False)
        self.loss = CrossEntropy()

    def forward(self, x: Any, labels: Any = None) -> Any:
        return self.loss(self.output(x), labels).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Head()
        self.head.output.weight = self.embed.weight


TABLE: dict[str, Split] = {
    "embed": Vocab(),
    "blocks.*.norm": Replicated(),
    "blocks.*.mlp.up": Column(),
    "blocks.*.mlp.down": Row(),
    "head.output": Column(),
    "head.loss": VocabLoss(33),
}
PLAN = ModelPlan(
    TABLE,
    ("embed", "blocks.0", "blocks.1", "blocks.2", "head"),
    (1.0,) * 5,
    lambda name: Normal(1.0),
    ties={"head.output.weight": "embed.weight"},
    recompute={"full": ("blocks.*",)},
)


def table(*without: str) -> dict[str, Split]:
    return {key: split for key, split in TABLE.items() if key not in without}


def nothing(model: Model) -> None:
    pass


def standalone(model: Model) -> None:
    model.scale = nn.Parameter(torch.ones(8))


def standalone_in_the_list(model: Model) -> None:
    model.blocks.gain = nn.Parameter(torch.ones(8))


def standalone_in_a_layer(model: Model) -> None:
    model.blocks[1].scale = nn.Parameter(torch.ones(8))


def more_layers(model: Model) -> None:
    model.final = nn.LayerNorm(8)
    model.adapters = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})


def tied_alone(model: Model) -> None:
    model.lm_head = nn.Linear(8, 33, bias=False)
    model.lm_head.weight = model.embed.weight


def buffered(model: Model) -> None:
    model.blocks[0].register_buffer("mask", torch.ones(4), persistent=False)


def buffered_root(model: Model) -> None:
    model.register_buffer("positions", torch.ones(4))


def dotted(model: Model) -> None:
    model.blocks[0]._modules["mlp.extra"] = nn.Linear(8, 8)


def untied(model: Model) -> None:
    model.head.output.weight = nn.Parameter(torch.ones(33, 8))


def one_module_twice(model: Model) -> None:
    model.blocks[2].mlp = model.blocks[0].mlp


def torch_dropout(model: Model) -> None:
    model.blocks[0].drop = nn.Dropout(0.1)


def normalised_weight(model: Model) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].mlp["up"])


SHARED = (("blocks.0.mlp", "blocks.2.mlp"),)
HOSTILE: list[tuple[Callable[[Model], None], dict[str, Any], str]] = [
    (nothing, {"layers": ("embed", "blocks.0", "blocks.2", "head"), "costs": (1.0,) * 4}, "layers lacks 'blocks.1' of the model, which has parameters; name it where the model runs through it."),
    (more_layers, {}, "layers lacks 'final', 'adapters' of the model, which have parameters"),
    (tied_alone, {"ties": {**PLAN.ties, "lm_head.weight": "embed.weight"}}, "layers lacks 'lm_head' of the model"),
    (standalone, {}, "the parameter 'scale' is in none of the plan's layers but outside them"),
    (standalone_in_the_list, {}, "the parameter 'blocks.gain' is in none of the plan's layers"),
    (standalone_in_a_layer, {}, "split says nothing about the parameter 'blocks.1.scale'; give 'blocks.1' Replicated()."),
    (nothing, {"layers": (*PLAN.layers[:-1], "heads")}, "layers names 'heads', which is not a module of the model; the nearest is 'head'."),
    (nothing, {"layers": ("embed", "blocks.0", "blocks.1", "blocks.1", "blocks.2", "head"), "costs": (1.0,) * 6}, "layers names 'blocks.1' 2 times; once is enough."),
    (nothing, {"layers": ("embed", "blocks", "head"), "costs": (1.0,) * 3}, "layers names 'blocks', a ModuleList, which cannot be called; name the modules inside it."),
    (nothing, {"layers": (*PLAN.layers, "head.output"), "costs": (1.0,) * 6}, "layers names 'head.output', which is in the layer 'head'; name one of the two."),
    (nothing, {"layers": ("",), "costs": (1.0,)}, "layers names '', which is not a module of the model."),
    (nothing, {"layers": (), "costs": ()}, "layers is empty"),
    (nothing, {"costs": (1.0, 1.0, 1.0, 1.0, float("nan"))}, "costs has nan for 'head' but must have finite numbers from 0 on."),
    (nothing, {"kinds": ("Block",)}, "kinds has 1 names but layers has 5"),
    (nothing, {"split": {**TABLE, "blocks.*.mpl.up": Column()}}, "split has 'blocks.*.mpl.up', which no module of the model has for a name; the nearest is 'blocks.2.mlp.up'; correct it or leave it out."),
    (nothing, {"split": {**table("blocks.*.mlp.up"), "blocks.*.mpl.up": Column()}}, "split says nothing about the parameter 'blocks.0.mlp.up.weight'; give 'blocks.0.mlp.up' Replicated(), and correct 'blocks.*.mpl.up', which no module of the model has for a name."),
    (nothing, {"split": {**TABLE, "blocks.*.*.up": Replicated()}}, ""),  # two whole names against three
    (nothing, {"split": {**table("blocks.*.mlp.up"), "blocks.*.mlp.*": Replicated(), "blocks.*.*.up": Column()}}, "split has 'blocks.*.*.up' and 'blocks.*.mlp.*', which both match 'blocks.0.mlp.up' and are equally specific"),
    (nothing, {"split": {**table("blocks.*.mlp.up"), "**.up": Column(), "blocks.*.mlp": Replicated()}}, "split has '**.up', which decides for nothing: 'blocks.*.mlp' is more specific and decides for all inside it, 'blocks.0.mlp.up' too"),
    (nothing, {"split": {**table("blocks.*.mlp.up"), "**.up": Column(), "blocks.1.mlp": Replicated()}}, ""),  # of one block alone
    (nothing, {"split": {**TABLE, "blocks.**.up.**": Replicated()}}, "split has 'blocks.**.up.**', which no module of the model has"),
    (nothing, {"split": {**TABLE, "blocks..up": Replicated()}}, "The pattern 'blocks..up' has an empty part"),
    (nothing, {"split": {**TABLE, "blocks.**up": Replicated()}}, "The pattern 'blocks.**up' has ** beside other characters"),
    (nothing, {"split": {**TABLE, "blocks.*": Column()}}, "split has Column at 'blocks.*', which is for a Linear, but 'blocks.0' is a Block"),
    (nothing, {"split": {**TABLE, "head": VocabLoss(33)}}, "split has VocabLoss at 'head' but 'head' has the parameter 'output.weight', which it does not cut"),
    (torch_dropout, {"split": {**TABLE, "blocks.0.drop": OverSequence()}}, "which is for a Dropout or a PositionEmbedding or a Rotary, but 'blocks.0.drop' is a torch.nn.modules.dropout.Dropout; use"),
    (normalised_weight, {"split": {**TABLE, "**": Replicated()}}, "split has Column at 'blocks.*.mlp.up' but 'blocks.0.mlp.up' has the parameter 'parametrizations.weight.original0', which it does not cut"),
    (nothing, {"split": {**TABLE, "blocks.*.core": AttentionCore(2), "blocks.*.core.*": Replicated()}}, "which is in 'blocks.0.core'; 'blocks.*.core' cuts that as one"),
    (nothing, {"recompute": {"full": ("block.*",)}}, "recompute has 'block.*' for full, which no module of the model has for a name"),
    (nothing, {"recompute": {"full": ("blocks.**",)}}, "recompute has 'blocks.**' for full but may not have **"),
    (nothing, {"recompute": {"full": ("blocks",)}}, "recompute has 'blocks' for full but 'blocks' is in none of the layers."),
    (untied, {}, "ties says that 'head.output.weight' is 'embed.weight' but in the model they are two"),
    (nothing, {"shared": SHARED}, "shared says that 'blocks.0.mlp' and 'blocks.2.mlp' have the same parameters but in the model they do not"),
    (nothing, {"shared": (("blocks.0.mlp", "blocks.9.mlp"),)}, "shared names 'blocks.9.mlp', which is not a module of the model"),
    (nothing, {"split": {**TABLE, "head.output": Replicated()}}, "'embed.weight' and 'head.output.weight' are one weight, but split cuts it as Vocab and as Replicated"),
    (one_module_twice, {"split": {**TABLE, "blocks.2.mlp.up": Replicated()}, "shared": SHARED}, "split has 'blocks.*.mlp.up' for 'blocks.0.mlp.up' and 'blocks.2.mlp.up' for 'blocks.2.mlp.up', which are one module; cut them alike."),
    (dotted, {}, "The module 'mlp.extra' in 'blocks.0' has a dot in its name"),
    (buffered, {}, "The model keeps the buffer 'blocks.0.mask', which nothing initialises; compute it instead."),
    (buffered_root, {}, "The model keeps the buffer 'positions'"),
    (nothing, {"initial": lambda name: None}, "initial('embed.weight') returns None but must return a Normal or a Constant."),
    (nothing, {"initial": lambda name: {}[name]}, "initial('embed.weight') raises KeyError: 'embed.weight'."),
]  # fmt: skip


@pytest.mark.parametrize(("change", "plan", "sentence"), HOSTILE, ids=[sentence[:60] for *_, sentence in HOSTILE])
def test_hostile_plan(change: Callable[[Model], None], plan: dict[str, Any], sentence: str) -> None:
    with torch.device("meta"):
        model = Model()
        change(model)
    if not sentence:
        check_plan(model, replace(PLAN, **plan))
        return
    with pytest.raises(UserError) as told:
        check_plan(model, replace(PLAN, **plan))
    assert sentence in str(told.value)
    assert str(told.value).endswith(".")
    assert "\n" not in str(told.value)


def test_names_that_look_like_patterns_are_names() -> None:
    with torch.device("meta"):
        model = Model()
        model.blocks[0].mlp["[up]"] = nn.Linear(8, 8)
    check_plan(model, replace(PLAN, split={**TABLE, "blocks.0.mlp.[up]": Replicated()}))
    with pytest.raises(UserError, match=r"no module of the model has"):
        check_plan(model, replace(PLAN, split={**TABLE, "blocks.*": Replicated(), "blocks.0.mlp.[u]": Replicated()}))


class Parts(nn.Module):
    """A linear layer, and a number of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.up = nn.Linear(8, 16)

    def forward(self, x: Any, samples: Any = None) -> Any:
        return self.up(x * self.scale)


def shapes(split: dict[str, Split]) -> dict[str, tuple[int, ...]]:
    """What each of two tensor ranks holds of two `Parts` and a list between."""
    mesh = Mesh(Layout(tp=2))

    def make() -> nn.Module:
        return nn.ModuleDict({"parts": nn.ModuleList(Parts() for _ in range(2))})

    plan = ModelPlan(split, ("parts.0", "parts.1"), (1.0, 1.0), lambda name: Constant(1.0))
    (stage,) = apply_parallelism(make, plan, Parallelism(mesh, StageMap((0, 2), (0,))), trains=False).stages
    return {name: tuple(local(parameter).shape) for name, parameter in stage.named_parameters()}


def test_a_module_given_whole_does_not_swallow_what_is_cut_inside_it(pool) -> None:
    """In either order; `*` of the enclosing pattern once matched the inner name first, and nothing was cut."""
    for split in (
        {"parts.*": Replicated(), "parts.*.up": Column()},
        {"parts.*.up": Column(), "parts.*": Replicated()},
        {"**": PerHead(), "parts.**.up": Column()},
    ):
        for held in pool.run(2, shapes, split):
            assert held["parts.0.up.weight"] == held["parts.1.up.weight"] == (8, 8)
            assert held["parts.0.scale"] == (8,)


def test_one_layer_may_be_told_otherwise(pool) -> None:
    for held in pool.run(2, shapes, {"parts.*": Replicated(), "parts.*.up": Column(), "parts.1.up": Replicated()}):
        assert held["parts.0.up.weight"] == (8, 8)
        assert held["parts.1.up.weight"] == (16, 8)


def test_ranks_refuse_a_plan_that_does_not_fit(pool) -> None:
    """In Python too, where nobody verified it."""
    with pytest.raises(WorkerError, match=r"split has 'part\.\*', which no module") as told:
        pool.run(2, shapes, {"parts.*": Replicated(), "part.*": Column()})
    assert isinstance(told.value.__cause__, UserError)


@sweep("preset", PRESETS, quick=(0, 12, 16, 22, 28, 32), slow=())
def test_the_plans_of_the_families_fit(preset: str) -> None:
    given = {"data": {"path": "unused"}, "model": {"preset": preset}}
    config = resolve(Config.model_validate(given), 1)
    with torch.device("meta"):
        model = make_model(config.model)
    check_plan(model, model_plan(config.model, config.data.sequence_length))
