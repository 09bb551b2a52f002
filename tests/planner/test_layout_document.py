"""The document of a layout: shards and groups of training, the bubble of `simulate`, and what moves elsewhere."""

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest

from tests.planner.golden_collectives import LAYOUTS
from tests.support.parity import Case, make_engine
from tests.support.sweep import sweep
from threefold.comm.layout import parse
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.errors import UserError
from threefold.parallel.parameter import offset
from threefold.planner.commands.show import layout_page
from threefold.planner.hardware import find_hardware
from threefold.planner.layout_document import VERSION, ModelShards, layout_document, moves, proof, when
from threefold.verify.layouts import compose
from threefold.verify.worker_pool import WorkerPool

NAMES = list(LAYOUTS)
QUICK = [NAMES.index(name) for name in ("pp2 tp2, interleaved", "dp2 tp2, ZeRO 2, untied, bf16")]
QUICK.append(NAMES.index("mixture, ep2 dp4 tp2, sequence parallel, ZeRO 3"))


def document_of(config: Config, **options: Any) -> dict[str, Any]:
    """The document as a reader of its JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(layout_document(config, **{"traffic": False, **options})))
    return found


def held_by_ranks(document: Mapping[str, Any]) -> dict[int, dict[str, list[list[int]]]]:
    """What the document says that each rank holds: start and end in each dim, by the name of the weight."""
    places: dict[tuple[int, int, int], int] = {}
    for at in document["layout"]["ranks"]:
        if at["pp"] == 0:
            places[at["dp"], at["cp"], at["tp"]] = len(places)
    found: dict[int, dict[str, list[list[int]]]] = {at["rank"]: {} for at in document["layout"]["ranks"]}
    for kind in document["tensors"]:
        for layer in kind["layers"]:
            uses = [layer, *kind["tied_layers"]]
            stages = [
                each
                for each in document["stages"]
                if any(each["first_layer"] <= use < each["end_layer"] for use in uses)
            ]
            name = kind["name"].replace("*", document["model"]["layers"][layer].rpartition(".")[2])
            for at in document["layout"]["ranks"]:
                if at["pp"] in [stage["pp_rank"] for stage in stages]:
                    shard = kind["shard_of_place"][places[at["dp"], at["cp"], at["tp"]]]
                    found[at["rank"]][name] = kind["shards"][shard]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_shards_tile_each_tensor_once(name: str) -> None:
    """Each element is in one shard, and the ranks of a stage that has a weight hold all of its shards."""
    document = document_of(LAYOUTS[name].config)
    held = held_by_ranks(document)
    whole: dict[str, list[int]] = {}
    for kind in document["tensors"]:
        for layer in kind["layers"]:
            whole[kind["name"].replace("*", document["model"]["layers"][layer].rpartition(".")[2])] = kind["shape"]
    assert sum(map(prod, whole.values())) == document["model"]["parameters"]
    pp_ranks: dict[int, list[int]] = {}
    for at in document["layout"]["ranks"]:
        pp_ranks.setdefault(at["pp"], []).append(at["rank"])
    for weight, shape in whole.items():
        holding = [ranks for ranks in pp_ranks.values() if weight in held[ranks[0]]]
        assert holding
        for ranks in holding:
            covered = np.zeros(shape, dtype=int)
            for bounds in {json.dumps(held[rank][weight]) for rank in ranks}:
                covered[tuple(slice(*each) for each in json.loads(bounds))] += 1
            assert (covered == 1).all(), weight


def of_training(case: Case) -> tuple[dict[str, list[list[int]]], dict[str, list[int]]]:
    """What this rank of a real layout holds, and the ranks of its groups."""
    engine = make_engine(case)
    bounds = {
        weight.name: [
            [start, start + size] for start, size in zip(offset(weight.parameter), weight.master.shape, strict=True)
        ]
        for weight in engine.model.weights
    }
    return bounds, {axis: list(getattr(engine.mesh, axis).ranks) for axis in ("dp", "tp", "pp", "cp", "ep")}


@sweep("name", NAMES, quick=QUICK)
def test_shards_and_groups_are_those_of_training(pool: WorkerPool, name: str) -> None:
    case = LAYOUTS[name]
    document = document_of(case.config)
    held, groups = held_by_ranks(document), document["layout"]["groups"]
    for rank, (bounds, of_mesh) in enumerate(pool.run(case.world_size, of_training, case)):
        assert {key: box for key, box in bounds.items() if prod(end - start for start, end in box)} == {
            key: box for key, box in held[rank].items() if prod(end - start for start, end in box)
        }
        for axis, ranks in of_mesh.items():
            assert ranks in groups[axis], axis
            assert [rank in group for group in groups[axis]].count(True) == 1


def config(parallel: str = "{dp: 2, tp: 2, pp: 2}", model: str = "gpt2-124m", **train: Any) -> Config:
    import yaml

    sections = {
        "model": {"preset": model},
        "data": {"path": "nowhere", "sequence_length": 64},
        "parallel": yaml.safe_load(parallel),
        "train": {"global_batch_size": 16, "device": "cpu", **train},
    }
    return resolve(config_of(sections), vocab_size=50_257)


@pytest.mark.parametrize(
    "parallel", ["{pp: 4}", "{pp: 2, schedule: zbv}", "{dp: 2, pp: 2, schedule: interleaved, stage_chunks: 3}"]
)
def test_the_bubble_is_that_of_simulate(threefold, parallel: str) -> None:
    """With the times of the stages in its document, on the same actions."""
    given = config(parallel, micro_batch_size=1)
    document = document_of(given)
    schedule, costs = document["schedule"], document["model"]["costs"]
    of_stages = [sum(costs[stage["first_layer"] : stage["end_layer"]]) for stage in document["stages"]]
    mean = sum(of_stages) / len(of_stages)
    times = ",".join(f"{cost / mean!r}" for cost in of_stages)
    status, output, error = threefold(
        *("simulate", "--schedule", schedule["name"], "--stages", str(given.parallel.pp)),
        *("--microbatches", str(schedule["micro_batches"]), "--chunks", str(given.parallel.stage_chunks)),
        *("--forward", times, "--json"),
    )
    assert (status, error) == (0, "")
    simulated = json.loads(output)
    assert schedule["bubble"] == pytest.approx(simulated["bubble"], abs=1e-12)
    assert schedule["length"] == pytest.approx(simulated["step_time"], rel=1e-5)
    assert schedule["busy"] == pytest.approx(simulated["busy_time"], rel=1e-5)
    for order in schedule["actions"]:
        assert all(before[4] <= after[3] + 1e-3 for before, after in pairwise(order))


def test_the_document_has_a_version_and_joins_the_planners_numbers() -> None:
    from threefold.planner.estimate import estimate

    given, hardware = config(), find_hardware("h100")
    document = document_of(given, hardware=hardware)
    assert (document["format"], document["version"]) == ("threefold layout", VERSION)
    found = estimate(given, hardware)
    assert document["memory"]["stages"] == [stage.causes for stage in found.stages]
    assert document["memory"]["limit"] == found.usable_bytes
    assert document["schedule"]["unit"] == "ms"
    assert document["schedule"]["after"]["gradients"] == pytest.approx(1e3 * found.time.gradients, rel=1e-5)
    assert [at["node"] for at in document["layout"]["ranks"]] == [0] * 8
    assert document_of(given)["schedule"]["unit"] == "mean forward passes"


@pytest.mark.slow
def test_collectives_are_those_of_a_dry_run() -> None:
    from threefold.planner.dry_run import run_stages

    given = config("{dp: 2, tp: 2, pp: 2, zero: 1}", model="gpt2-124m", micro_batch_size=4)
    ranks = document_of(given, traffic=True)["collectives"]["ranks"]
    for described, report in zip(ranks, run_stages(given), strict=True):
        assert described["rank"] == report.rank
        assert [
            (each["axis"], each["operation"], each["count"], each["bytes"]) for each in described["collectives"]
        ] == [(each.axis, each.operation, each.count, each.nbytes) for each in report.collectives]
        moments = {(each["axis"], each["operation"]): each["when"] for each in described["collectives"]}
        assert moments["tp", "all_reduce"] == "pass"
        assert moments["pp", "send"] == "send"
        assert (moments["dp", "all_gather"], moments["dp", "reduce_scatter"]) == ("start", "end")
    assert (when("dp", "all_gather", 3), when("dp", "reduce_scatter", 2), when("dp", "all_reduce", 3)) == (
        *("pass", "backward", "end"),
    )


def test_a_large_world_is_described_by_one_copy_of_the_model() -> None:
    given = config("{dp: 64, tp: 2, pp: 4}", global_batch_size=128)
    document = document_of(given)
    assert document["layout"]["world"] == 512
    assert [at["rank"] for at in document["layout"]["ranks"]] == list(range(8))
    assert document["layout"]["groups"]["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    largest = document_of(config("{dp: 256, zero: 3}", global_batch_size=256))
    assert len(largest["layout"]["ranks"]) == 256
    assert len(layout_page({**largest, "compare": None, "proof": None}).encode()) < 300_000


LAYOUT_PAIRS = [("tp2·pp2", "dp4"), ("dp2·tp2", "tp4"), ("dp4 zero3", "dp2·pp2"), ("pp4", "dp2")]


@pytest.mark.parametrize(("one", "other"), LAYOUT_PAIRS)
def test_moves_are_counted_element_by_element(one: str, other: str) -> None:
    base = LAYOUTS["dp2"].config
    before, after = (compose(base, parse(words)) for words in (one, other))
    had, needs = (held_by_ranks(document_of(each)) for each in (before, after))
    found = json.loads(json.dumps(moves(before, after)))
    shapes = {kind.name: kind.shape for kind in ModelShards(base).kinds}
    for each in found["ranks"]:
        kept = received = dropped = 0
        own, new = had.get(each["rank"], {}), needs[each["rank"]]
        for name in {**own, **new}:
            shape = next(
                shape
                for pattern, shape in shapes.items()
                if pattern.split("*")[-1] in name and name.startswith(pattern.split("*")[0])
            )
            masks = [np.zeros(shape, dtype=bool) for _ in range(2)]
            for mask, bounds in zip(masks, (own.get(name), new.get(name)), strict=True):
                if bounds is not None:
                    mask[tuple(slice(*each) for each in bounds)] = True
            kept += int((masks[0] & masks[1]).sum())
            received += int((masks[1] & ~masks[0]).sum())
            dropped += int((masks[0] & ~masks[1]).sum())
        assert (each["kept"], each["received"], each["dropped"]) == (kept, received, dropped)
    by_weight = [row for tensor in found["tensors"] for row in tensor["ranks"] for _ in tensor["layers"]]
    assert sum(row[2] for row in by_weight) == sum(each["received"] for each in found["ranks"]) > 0


def test_nothing_moves_to_the_same_layout() -> None:
    given = LAYOUTS["dp2 pp2, ZeRO 3"].config
    held = held_by_ranks(document_of(given))
    ranks = moves(given, given)["ranks"]
    assert len(ranks) == 4
    for each in ranks:
        boxes = held[each["rank"]].values()
        assert each["kept"] == sum(prod(max(0, end - start) for start, end in box) for box in boxes)
        assert (each["received"], each["dropped"]) == (0, 0)


REPORT: dict[str, Any] = {
    "model": "GPT",
    "dtype": "fp64",
    "steps": 3,
    "full": False,
    "tolerance": 1e-12,
    "layouts": [
        {"layout": "dp2", "verdict": "equal", "worst_by_parameter": {"blocks.0.attn.qkv.weight": 1e-15}},
        {"layout": "tp2", "verdict": "departs", "worst_by_parameter": {"blocks.0.attn.qkv.weight": float("inf")}},
    ],
}


def test_a_report_of_verify_becomes_errors_by_parameter() -> None:
    document = document_of(config())
    found = proof(REPORT, "The report r.json", document)
    assert found["parameters"] == ["blocks.0.attn.qkv.weight"]
    assert found["errors"] == [[1e-15, "inf"]]
    assert [each["verdict"] for each in found["layouts"]] == ["equal", "departs"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        ([], "The report r.json is not a report of threefold verify; write one with"),
        ({"layouts": [{"layout": "dp2"}]}, r"is not a report of threefold verify \(it has no 'verdict'\); write one"),
        ({**REPORT, "tolerance": "small"}, "is not a report of threefold verify; write one"),
        (
            {**REPORT, "layouts": [{"layout": "dp2", "verdict": "equal", "worst_by_parameter": {"w": 0}}]},
            "has errors of w, which this config's model does not have; give a report of the same model",
        ),
    ],
)
def test_a_wrong_report_is_one_sentence(report: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        proof(report, "The report r.json", document_of(config()))


def test_a_page_holds_its_document_whatever_its_names_are() -> None:
    name = "</script><!--document--><b>"
    page = layout_page({"name": name})
    assert name not in page
    inside = page.split('id="document">')[1].split("</script>")[0]
    assert json.loads(inside) == {"name": name}
