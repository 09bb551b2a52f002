"""Any set of tied modules, on one rank or several, computes what one process computes."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.parallel.pipeline.tied_model import SHARED, in_layout, one_process
from tests.support.parity import Case, departures
from tests.support.sweep import sweep
from threefold.errors import UserError
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.sharding import ModelPlan, Normal
from threefold.parallel.pipeline.partition import StageMap, shared_between, stage_map

BASE = Case(dtype="fp64", layers=7, dropout=0.1, accumulation=4, steps=3)


@pytest.fixture(scope="module")
def one(pool) -> Any:
    return cache(lambda case: pool.run(1, one_process, case)[0])


@sweep(
    ("schedule", "dp", "tp", "pp", "chunks", "partition"),
    [
        ("1f1b", 2, 1, 1, 1, "cost"),
        ("1f1b", 1, 1, 4, 1, "uniform"),  # three ranks share it
        ("1f1b", 1, 2, 2, 1, "class:Block"),  # two uses on the first rank, one on the second
        ("1f1b", 1, 2, 2, 1, (3,)),  # one use on the first rank, two on the second
        ("interleaved", 1, 2, 2, 4, "cost"),  # two stages of a rank have one module in common
        ("zero-bubble", 2, 1, 2, 2, "cost"),
        ("zbv", 1, 2, 3, 2, (1, 3, 4, 5, 8)),
    ],
    quick=(2, 6),
)
def test_three_layers_share_their_weights(
    pool, one, schedule: str, dp: int, tp: int, pp: int, chunks: int, partition: Any
) -> None:
    settings = (("parallel.stage_chunks", chunks), ("parallel.partition", partition))
    case = BASE.with_layout(dp, tp, pp, schedule=schedule, settings=settings)
    found = departures(one(case.unsplit), pool.run(case.world_size, in_layout, case), case)
    assert not found, "\n".join(found[:10])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), [("zero-bubble", 3), ("zbv", 2)])
def test_copies_are_the_same_bits_after_fifty_steps(pool, schedule: str, chunks: int) -> None:
    settings = (("parallel.stage_chunks", chunks),)
    case = Case(layers=7, steps=50, sequence=5, batch=4, accumulation=4, dropout=0.1)
    traces = pool.run(3, in_layout, case.with_layout(1, 1, 3, schedule=schedule, settings=settings))
    copies = [trace.final["blocks.1.mlp.up.weight"] for trace in traces if "blocks.1.mlp.up.weight" in trace.final]
    tables = [trace.final["embed.tokens.weight"] for trace in traces if "embed.tokens.weight" in trace.final]
    assert len(copies) > 1
    assert len(tables) == (1 if schedule == "zbv" else 2)
    assert all(copy.equal(copies[0]) for copy in copies)
    assert all(table.equal(tables[0]) for table in tables)
    assert not traces[0].final.keys() & {"head.output.weight", "blocks.3.mlp.up.weight", "blocks.5.mlp.up.weight"}


def plan(**ties: Any) -> ModelPlan:
    layers = ("a", "b", "c", "d")
    return ModelPlan({}, layers, (1.0,) * 4, lambda name: Normal(1.0), **ties)


def test_each_rank_that_uses_tied_modules_is_named_once_and_the_owner_first() -> None:
    four = StageMap((0, 1, 2, 3, 4), (0, 1, 2, 3))
    assert shared_between(plan(shared=(("d.x", "a.x", "b.x"),)), four) == {"d.x": (3, 0, 1)}
    assert shared_between(plan(shared=(("a", "c"),), ties={"d.w": "b.w"}), four) == {"b.w": (1, 3), "a": (0, 2)}
    folded = StageMap((0, 1, 2, 3, 4), (0, 1, 1, 0))
    assert shared_between(plan(shared=(("a", "d"), ("b", "c"))), folded) == {}
    assert shared_between(plan(shared=(("a", "b", "c", "d"),)), folded) == {"a": (0, 1)}


def test_sharing_weights_between_stages_of_a_rank_is_refused_where_replicas_share_them_out() -> None:
    """`fully_shard` gathers a weight for one stage alone: each stage would get a copy of its own, and drift apart."""
    chunks = (("parallel.stage_chunks", 4), ("parallel.zero", 2))
    config = BASE.with_layout(2, 1, 2, schedule="interleaved", settings=chunks).config
    whole = gpt_plan(config.model, config.data.sequence_length)
    stage_map(whole, config)  # the first and the last stage are on different ranks
    with pytest.raises(UserError, match=r"zero is 2 but blocks\.1\.mlp and blocks\.3\.mlp share .* rank 1; use 0"):
        stage_map(replace(whole, shared=(SHARED,)), config)
    one_stage = BASE.with_layout(2, 1, 2, settings=(("parallel.zero", 2), ("parallel.partition", (3,)))).config
    stage_map(replace(whole, shared=(SHARED,)), one_stage)


def test_tied_names_have_one_whole_name() -> None:
    tied = plan(shared=(("a.x", "c.x"),), ties={"d.w": "b.w"})
    names = ("a.x.weight", "c.x.weight", "c.xx.weight", "d.w", "d.w2")
    assert [tied.whole_name(name) for name in names] == ["a.x.weight", "a.x.weight", "c.xx.weight", "b.w", "d.w2"]
    assert gpt_plan(BASE.config.model, 8).whole_name("head.output.weight") == "embed.tokens.weight"


def test_a_chain_of_ties_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'c' shares the weights of 'b', which shares those of 'a'"):
        plan(shared=(("a", "b"), ("b", "c")))
