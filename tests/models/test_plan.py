"""The plan of one's own model: what it leaves out follows from the model, and what is wrong is one sentence."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.custom_token_model import Tiny
from threefold.errors import UserError
from threefold.models.plan import Plan
from threefold.models.sharding import (
    AsConstructed,
    Column,
    Drawn,
    Normal,
    PerHead,
    Replicated,
    Row,
    Vocab,
    check_tensor_axis,
)
from threefold.verify.plan_check import check_plan

SHARD = Tiny.plan.shard or {}


def model(blocks: int = 11) -> nn.Module:
    with torch.device("meta"):
        return Tiny(37, 13, blocks)


def changed(**changes: object) -> Plan:
    given = {"layers": Tiny.plan.layers, "shard": SHARD, **changes}
    return Plan(**given)  # type: ignore[arg-type]


def test_what_is_left_out_follows_from_the_model() -> None:
    made = Tiny.plan.build(model())
    check_plan(model(), made)
    assert made.layers == ("embed", *(f"blocks.{number}" for number in range(11)), "head")
    assert made.kinds == ("Embed", *["Block"] * 11, "Head")
    assert made.recompute == {"full": made.layers[1:-1]}
    assert made.ties == {"head.output.weight": "embed.tokens.weight"}
    width = 18
    block = 4 * (width * width + width) + 2 * width + 25 * width + 25 + 25 * width + width + width + 1
    assert made.costs == (37 * width / 16 + 13 * width, *[block] * 11, 37 * width + 2 * width)
    assert made.split_of("blocks.7.norm.weight") == made.split_of("blocks.7.scale") == Replicated()
    assert made.split_of("blocks.7.gate") == Replicated()
    assert made.split_of("blocks.7.up.weight") == Column()
    assert made.initial("blocks.7.up.weight") == Drawn(nn.init.xavier_uniform_)
    assert made.initial("blocks.7.up.bias") == AsConstructed()


def test_costs_ties_recompute_and_initial_values_can_be_given() -> None:
    made = changed(
        costs={"blocks.*": 7},
        recompute={"selective": ("blocks.*.up",)},
        initial={"**.weight": Normal(0.1)},
        tied=[("embed.tokens.weight", "head.output.weight")],
    ).build(model(2))
    assert made.costs[1:3] == (7.0, 7.0)
    assert set(made.recompute) == {"full", "selective"}
    assert made.initial("blocks.0.up.weight") == Normal(0.1)
    assert made.ties == {"embed.tokens.weight": "head.output.weight"}


def test_without_rules_everything_is_replicated() -> None:
    made = Plan(["embed", "blocks.*", "head"]).build(model(2))
    check_plan(model(2), made)
    assert {type(rule) for rule in made.split.values()} == {Replicated}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Plan("embed"), "layers is 'embed' but must be a list of names, such as ['embed', 'blocks.*']."),
        (lambda: changed(shard={"embed": Vocab}), "shard has the class Vocab at 'embed'; write Vocab()."),
        (lambda: changed(shard={"embed": "column"}), "shard has 'column' at 'embed' but must have a rule, such as"),
        (lambda: changed(tied=["head.output.weight"]), "tied has 'head.output.weight' but must have pairs of names"),
        (lambda: changed(layers=["embed", "block.*", "head"]), "layers has 'block.*', which no module of the model"),
        (lambda: changed(layers=["embed", "blocks.*"]), "layers lacks 'head' of the model, which has parameters"),
        (
            lambda: changed(shard={key: rule for key, rule in SHARD.items() if key != "blocks.*.up"}),
            "shard says nothing about 'blocks.*.up' (Linear); give it Column(), Row(), Vocab() or Replicated().",
        ),
        (
            lambda: changed(shard={key: rule for key, rule in SHARD.items() if key != "blocks.*.gate"}),
            "shard says nothing about 'blocks.*.gate' (a standalone parameter); give it",
        ),
        (
            lambda: changed(shard={**SHARD, "blocks.*.upp": Column()}),
            "shard has 'blocks.*.upp', which no module or parameter of the model has for a name",
        ),
        (
            lambda: changed(shard={**SHARD, "blocks.*.gate": Row()}),
            "shard has Row at 'blocks.*.gate', which is a standalone parameter; use Replicated() or PerHead()",
        ),
        (
            lambda: changed(shard={**SHARD, "blocks.*.norm": PerHead(), "**.bias": Replicated()}),
            "shard has Replicated at '**.bias', which 'blocks.0.norm.bias' has for a name as well, of a module that is",
        ),
        (
            lambda: changed(shard={**SHARD, "blocks.*.key": Column(heads=5)}),
            "with heads=5, which must divide the 18 features of 'blocks.0.key'; use heads=6.",
        ),
        (
            lambda: changed(shard={**SHARD, "blocks.*.norm": Column()}),
            "which is for a Linear, but 'blocks.0.norm' is a LayerNorm; use Replicated()",
        ),
        (lambda: changed(initial={"blocks.*.upp": Normal(1)}), "initial has 'blocks.*.upp', which no parameter of"),
        (lambda: changed(costs={"bloks.*": 1}), "costs has 'bloks.*', which no layer of the model has for a name"),
        (lambda: changed(tied=[("head.output.bias", "embed.tokens.weight")]), "tied names 'head.output.bias', which"),
    ],
)
def test_a_wrong_plan_is_one_sentence(make: Callable[[], Plan], sentence: str) -> None:
    with pytest.raises(UserError) as told:
        check_plan(model(2), make().build(model(2)))
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


def test_heads_that_the_tensor_axis_does_not_divide() -> None:
    made = Tiny.plan.build(model(2))
    for size in (1, 2, 3, 6):
        check_tensor_axis(made, size)
    with pytest.raises(UserError, match=r"parallel.tp is 4 but must divide the 6 heads of 'blocks.\*.query'; use 3."):
        check_tensor_axis(made, 4)


def test_frozen_parameters_are_in_the_plan() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert Plan(["0", "1"]).build(layers).frozen == frozenset()
    layers[1].bias.requires_grad_(False)
    assert Plan(["0", "1"]).build(layers).frozen == {"1.bias"}


def test_a_tied_weight_that_is_frozen_in_one_place_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers[0].weight.requires_grad_(False)
    sentence = (
        r"^'0\.weight' is frozen \(requires_grad is False\) and '1\.weight', which is tied to it, is trained; freeze"
    )
    with pytest.raises(UserError, match=sentence):
        Plan(["0", "1"], tied=[("1.weight", "0.weight")]).build(layers)
    layers[1].weight.requires_grad_(False)
    assert Plan(["0", "1"], tied=[("1.weight", "0.weight")]).build(layers).frozen == {"0.weight", "1.weight"}


def test_a_model_without_trained_parameters_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    with pytest.raises(
        UserError, match=r"^All parameters of the model are frozen \(requires_grad is False\); leave one"
    ):
        Plan(["0", "1"]).build(layers)


def test_running_statistics_are_refused() -> None:
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(UserError, match="'1' is a BatchNorm1d, which keeps statistics of the samples of its own rank"):
        Plan(["0", "1"]).build(norm)
