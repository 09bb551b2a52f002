"""Stages and their bounds."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.parity import Case
from threefold.errors import UserError
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.sharding import ModelPlan, Normal, Replicated
from threefold.parallel.pipeline.partition import (
    StageMap,
    layers_by_rank,
    partition_by_class,
    partition_by_cost,
    partition_uniform,
    partition_uniform_chunks,
    shared_between,
    stage_bounds,
    stage_map,
)
from threefold.parallel.pipeline.stage import Stage, whole_parameters
from threefold.parallel.shard_modules import shard_modules


@pytest.mark.parametrize(
    ("items", "pp", "chunks", "bounds"),
    [
        (7, 2, 1, [0, 3, 7]),  # B's seven layers on two stages
        (8, 4, 1, [0, 2, 4, 6, 8]),
        (10, 4, 1, [0, 2, 4, 7, 10]),
        (8, 2, 2, [0, 2, 4, 6, 8]),
        (7, 2, 3, [0, 1, 2, 3, 4, 5, 7]),
        (3, 3, 1, [0, 1, 2, 3]),
        (5, 1, 1, [0, 5]),
    ],
)
def test_uniform_bounds(items: int, pp: int, chunks: int, bounds: list[int]) -> None:
    assert partition_uniform(items, pp, chunks) == bounds


@pytest.mark.parametrize(
    ("items", "pp", "chunks", "bounds"),
    [
        (10, 2, 2, [0, 2, 5, 7, 10]),  # where `partition_uniform` gives [0, 2, 4, 7, 10]
        (7, 2, 1, [0, 3, 7]),
        (8, 2, 2, [0, 2, 4, 6, 8]),
        (11, 2, 2, [0, 2, 5, 8, 11]),  # parts of 5 and 6
        (13, 3, 2, [0, 2, 4, 6, 8, 10, 13]),
        (22, 4, 3, [0, 1, 3, 5, 7, 8, 10, 12, 14, 16, 18, 20, 22]),
        (4, 2, 2, [0, 1, 2, 3, 4]),
    ],
)
def test_uniform_bounds_within_each_chunk(items: int, pp: int, chunks: int, bounds: list[int]) -> None:
    assert partition_uniform_chunks(items, pp, chunks) == bounds


def test_uniform_chunks_are_colossal_ais_where_it_takes_the_number_of_layers() -> None:
    """Against its function, written out: it refuses layers that the chunks do not divide."""

    def parts_of(items: int, pp: int, chunks: int) -> list[list[tuple[int, int]]]:
        parts: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
        each = items // chunks
        for chunk in range(chunks):
            start = chunk * each
            for rank in range(pp):
                end = start + each // pp + (rank >= pp - each % pp)
                parts[rank].append((start, end))
                start = end
        return parts

    for pp, chunks in [(1, 3), (2, 2), (3, 2), (4, 3)]:
        for items in range(pp * chunks, 60, chunks):
            bounds = partition_uniform_chunks(items, pp, chunks)
            assert layers_by_rank(bounds, pp) == parts_of(items, pp, chunks)


@pytest.mark.parametrize(
    ("schedule", "parts"),
    [
        ("interleaved", [[(0, 2), (5, 7)], [(2, 5), (7, 10)]]),
        ("zbv", [[(0, 2), (7, 10)], [(2, 5), (5, 7)]]),
        ("1f1b", "bounds has 4 stages but schedule 1f1b has 2 on 2 ranks; partition the layers into 2."),
        ("1f2b", "schedule is 1f2b but must be"),
    ],
)
def test_layers_of_each_rank(schedule: str, parts: list[list[tuple[int, int]]] | str) -> None:
    if isinstance(parts, list):
        assert layers_by_rank([0, 2, 5, 7, 10], 2, schedule) == parts
        return
    with pytest.raises(UserError) as caught:
        layers_by_rank([0, 2, 5, 7, 10], 2, schedule)
    assert str(caught.value).startswith(parts)


@pytest.mark.parametrize(
    ("costs", "pp", "bounds"),
    [
        ([0.1, 1, 1, 1, 1, 1, 1, 1, 1, 2.3], 2, [0, 6, 10]),
        ([1] * 6, 3, [0, 2, 4, 6]),
        ([5, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 9], 2, [0, 3, 4]),
        ([1, 1, 1], 3, [0, 1, 2, 3]),
        ([4], 1, [0, 1]),
    ],
)
def test_bounds_by_cost(costs: list[float], pp: int, bounds: list[int]) -> None:
    assert partition_by_cost(costs, pp) == bounds


def test_bounds_by_cost_are_the_best_there_are() -> None:
    """Against trying every way to cut."""
    from itertools import combinations, pairwise

    costs = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]

    def peak(bounds: tuple[int, ...] | list[int]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise(bounds))

    for pp in range(1, 8):
        ways = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), pp - 1)]
        assert peak(partition_by_cost(costs, pp)) == min(peak(way) for way in ways)


def test_bounds_by_cost_of_a_thousand_layers_on_as_many_stages() -> None:
    """In the time of layers · stages; a third factor would take minutes."""
    assert partition_by_cost([5.0, *[1.1] * 1022, 9.0], 1024) == list(range(1025))
    bounds = partition_by_cost([1.0] * 1024, 256)
    assert bounds == list(range(0, 1025, 4))


def test_bounds_by_class_share_that_class_evenly() -> None:
    kinds = ["Embedding", *["Block"] * 7, "Norm", "Head"]
    assert partition_by_class(kinds, "Block", 2) == [0, 4, 10]
    assert partition_by_class(kinds, "Block", 3) == [0, 3, 5, 10]


@pytest.mark.parametrize(
    "cut",
    [
        lambda: partition_uniform(3, 4),
        lambda: partition_uniform(3, 2, 2),
        lambda: partition_uniform_chunks(7, 2, 4),
        lambda: partition_by_cost([1.0, 1.0, 1.0], 4),
        lambda: partition_by_class(["Block", "Block"], "Block", 3),
    ],
)
def test_an_empty_stage_is_refused(cut: Any) -> None:
    with pytest.raises(UserError, match="at most"):
        cut()


def test_the_plan_knows_the_class_of_each_layer() -> None:
    case = Case(layers=3)
    plan = gpt_plan(case.config.model, case.sequence)
    with torch.device("meta"):
        model = GPT(case.config.model)
    assert [type(model.get_submodule(name)).__name__ for name in plan.layers] == list(plan.kinds)


@pytest.mark.parametrize(
    ("partition", "stages", "bounds"),
    [
        ("cost", 2, [0, 5, 9]),
        ("uniform", 4, [0, 2, 4, 6, 9]),
        ("uniform-chunks", 4, [0, 2, 4, 6, 9]),
        ("class:Block", 3, [0, 3, 5, 9]),
        ((1, 2, 8), 4, [0, 1, 2, 8, 9]),
        ("class:Block", 4, [0, 2, 4, 6, 9]),
        ("class:Head", 2, "the model has 1 layer of that class and 2 stages; use class:Block or cost."),
        ("class:block", 2, "the model has 0 layers of that class and 2 stages; use class:Block or cost."),
        ("class:Block", 8, "the model has 7 layers of that class and 8 stages; use cost."),
        ((3, 5), 4, "4 stages of 9 layers need 3 ascending numbers from 1 to 8; use [2, 4, 6]."),
        ((0, 5, 5), 4, "4 stages of 9 layers need 3 ascending numbers from 1 to 8; use [1, 5, 6]."),
        ((7, 9, 12), 4, "4 stages of 9 layers need 3 ascending numbers from 1 to 8; use [6, 7, 8]."),
        ((2, 1, 8), 4, "4 stages of 9 layers need 3 ascending numbers from 1 to 8; use [2, 3, 8]."),
        ("cost", 10, "makes 10 stages but there are 9 layers; use 9 at most."),
        (tuple(range(1, 10)), 10, "makes 10 stages but there are 9 layers; use 9 at most."),
    ],
)  # fmt: skip
def test_partition(partition: str | tuple[int, ...], stages: int, bounds: list[int] | str) -> None:
    plan = gpt_plan(Case(layers=7).config.model, 11)
    if isinstance(bounds, list):
        assert stage_bounds(plan.costs, plan.kinds, stages, partition) == bounds
        return
    with pytest.raises(UserError) as caught:
        stage_bounds(plan.costs, plan.kinds, stages, partition)
    assert str(caught.value).endswith(f" {bounds}")
    assert "parallel.p" in str(caught.value)


def test_uniform_chunks_of_a_model_and_its_pipeline() -> None:
    """Ten layers: the config's setting, with the stages of its schedule."""
    settings = (("parallel.partition", "uniform-chunks"), ("parallel.stage_chunks", 2))
    case = Case(layers=8, pp=2, schedule="interleaved", settings=settings)
    plan = gpt_plan(case.config.model, case.sequence)
    assert stage_map(plan, case.config) == StageMap((0, 2, 5, 7, 10), (0, 1, 0, 1))
    with pytest.raises(UserError, match="3 stages are not equally many for each of 2 pipeline ranks; use uniform"):
        stage_bounds(plan.costs, plan.kinds, 3, "uniform-chunks", 2)


@pytest.mark.parametrize("pp", range(1, 10))
def test_every_layer_is_on_exactly_one_stage(pp: int) -> None:
    case = Case(layers=7)
    plan = gpt_plan(case.config.model, case.sequence)
    bounds = partition_by_cost(plan.costs, pp)
    with torch.device("meta"):
        model = GPT(case.config.model)
        stages = [Stage(model, plan, *bounds[stage : stage + 2]) for stage in range(pp)]
    assert [name for stage in stages for name in stage.layer_names] == list(plan.layers)
    owned = {name for stage in stages for name, _ in whole_parameters([stage])}
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    assert all(stage.layer_names for stage in stages)


def test_a_parameter_that_the_table_forgets_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = ModelPlan({"0": Replicated()}, ("0", "1"), (1.0, 1.0), lambda name: Normal(1.0))
    with pytest.raises(ValueError, match=r"says nothing about the parameter '1\.weight'"):
        shard_modules([model], plan.split, context=None)  # type: ignore[arg-type]


def test_tied_weights_know_the_stages_that_share_them() -> None:
    plan = gpt_plan(Case(layers=4).config.model, 8)
    assert shared_between(plan, StageMap((0, 6), (0,))) == {}
    assert shared_between(plan, StageMap((0, 3, 6), (0, 1))) == {"embed.tokens.weight": (0, 1)}
    assert shared_between(plan, StageMap((0, 2, 4, 6), (0, 1, 2))) == {"embed.tokens.weight": (0, 2)}
    assert shared_between(plan, StageMap((0, 1, 3, 4, 6), (0, 1, 1, 0))) == {}
    untied = gpt_plan(Case(layers=4, tie=False).config.model, 8)
    assert shared_between(untied, StageMap((0, 3, 6), (0, 1))) == {}


def test_a_stage_takes_no_name_that_a_layer_may_have() -> None:
    names = ("first", "plan", "end", "is_last", "layers")
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    plan = ModelPlan({"*": Replicated()}, names, (1.0,) * len(names), lambda name: Normal(1.0))
    stage = Stage(model, plan, 0, len(names))
    assert {name for name, _ in stage.named_parameters()} == {name for name, _ in model.named_parameters()}
