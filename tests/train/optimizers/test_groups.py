"""Groups of weights with settings and optimizers of their own, beside torch's parameter groups and in every layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import Command
from tests.support.parity import MOE_SIZES, Case, check, make_engine
from tests.support.sweep import sweep
from tests.support.updates import STEPS, train_torch, weights
from tests.train.support import Run, losses_of, same, train_rank
from threefold.checkpoint.resume import find_resumption
from threefold.config import OptimizerConfig, resolve
from threefold.config.loading import config_of
from threefold.config.optimizer import hyper_parameters
from threefold.errors import UserError
from threefold.models.family import model_plan
from threefold.models.groups import check_groups
from threefold.parallel.parameter import ShardedMatrix
from threefold.planner.model_size import ModelSize, shard_coordinates
from threefold.train.optim import Entry
from threefold.train.optimizers import update_rule
from threefold.verify.worker_pool import WorkerPool

Groups = tuple[tuple[tuple[str, Any], ...], ...]
"""Groups as their items, hashable."""
GROUPS: Groups = (
    (("match", "blocks.**"), ("name", "muon"), ("lr_scale", 0.5), ("eps", 1e-5)),
    (("match", "blocks.1.mlp"), ("name", "sgd"), ("momentum", 0.9), ("lr_scale", 20.0)),
    (("match", "blocks.2.*.proj"), ("name", "adam"), ("betas", (0.7, 0.9)), ("eps", 1e-5), ("weight_decay", 0.3)),
    (("match", "**.bias"), ("weight_decay", 0.2), ("lr_scale", 2.0)),
    (("match", "embed.*"), ("betas", (0.8, 0.9)), ("weight_decay", 0.01)),
)
"""Of a GPT: a matrix for Muon between others, a block's half and a projection by other rules, decaying biases."""
OF_EXPERTS: Groups = (
    (("match", "blocks.**.experts"), ("name", "muon"), ("lr_scale", 0.5), ("eps", 1e-5)),
    (("match", "blocks.2.mlp.experts.down"), ("weight_decay", 0.0), ("lr_scale", 3.0)),
    (("match", "**.router"), ("name", "sgd"), ("lr_scale", 10.0)),
)


def grouped(groups: Groups = GROUPS, **changes: Any) -> Case:
    return Case(**{"dtype": "fp64", "steps": 4, "groups": groups, "sequence": 12, **changes})


SHARED = ("parallel.sequence_parallel", True)
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 3, "settings": (("parallel.zero", 1),)},
    {"dp": 2, "tp": 2, "settings": (("parallel.zero", 3),)},
    {"tp": 3},
    {"tp": 2, "settings": (SHARED, ("train.recompute", "full"))},
    {"pp": 3},
    {"pp": 2, "schedule": "interleaved", "layers": 4, "accumulation": 4},
    {"pp": 2, "schedule": "zbv", "layers": 4, "accumulation": 4},
    {"cp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "settings": (("parallel.zero", 1),)},
]


@sweep("changes", LAYOUTS, quick=(1,), slow=(0, 3, 5, 7, 8), ids=str)
def test_layouts(pool, expected, changes: dict[str, Any]) -> None:
    check(pool, expected, grouped(**changes))


@sweep(
    "changes",
    [{"dp": 2, "settings": (("parallel.ep", 2),)}, {"dp": 2, "tp": 2, "settings": (("parallel.ep", 2),)}],
    slow=(1,),
    ids=str,
)
def test_experts(pool, expected, changes: dict[str, Any]) -> None:
    """Each expert's matrices by Muon of their own, and one block's by another group; the ranks hold two experts."""
    check(pool, expected, grouped(OF_EXPERTS, model=MOE_SIZES, positions="rope", tie=False, **changes))


def rule_of(parameters: dict[str, torch.Tensor], groups: Sequence[dict[str, Any]], **settings: Any):
    """The rule of whole parameters, none of them hidden, and the mapping that it finds their gradients in."""
    config = OptimizerConfig.model_validate({**hyper_parameters("adamw"), **settings, "groups": list(groups)})
    gradients: dict[torch.Tensor, torch.Tensor] = {}
    entries = [
        Entry(name, value, value, value, gradients, ShardedMatrix(value, ()))  # type: ignore[arg-type]
        for name, value in parameters.items()
    ]
    return update_rule(config)(entries, config), gradients


@torch.no_grad()
def test_like_the_parameter_groups_of_torch() -> None:
    """AdamW in two groups, SGD for another: the last group that matches a weight decides, alone."""
    ours, theirs = weights(0), weights(0)
    rule, gradients = rule_of(
        ours,
        [
            {"match": "*", "lr_scale": 7.0},
            {"match": "bias", "weight_decay": 0.3, "lr_scale": 0.5},
            {"match": "wi*", "betas": (0.7, 0.8)},
            {"match": "table", "name": "sgd", "momentum": 0.9, "lr_scale": 3.0},
        ],
        weight_decay=0.1,
    )
    for step in range(STEPS):
        gradients.update(zip(ours.values(), weights(100 + step).values(), strict=True))
        rule.step(0.01 * (step + 1))
    scales = {"matrix": 7.0, "bias": 0.5, "wide": 1.0, "table": 3.0}
    given = {
        "matrix": {"weight_decay": 0.1, "betas": (0.9, 0.95)},
        "bias": {"weight_decay": 0.3, "betas": (0.9, 0.95)},
        "wide": {"weight_decay": 0.1, "betas": (0.7, 0.8)},
    }
    with torch.enable_grad():
        adamw = torch.optim.AdamW([{"params": [theirs[name]], **each} for name, each in given.items()])
        sgd = torch.optim.SGD([theirs["table"]], momentum=0.9, weight_decay=0.1)
    for step in range(STEPS):
        for name, gradient in weights(100 + step).items():
            theirs[name].grad = gradient
        for optimizer, names in ((adamw, list(given)), (sgd, ["table"])):
            for group, name in zip(optimizer.param_groups, names, strict=True):
                group["lr"] = 0.01 * (step + 1) * scales[name]
            optimizer.step()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-14, atol=1e-15)
    kept = {entry.name: (rule.lr_scale(entry), rule.weight_decay(entry)) for entry in rule.entries}
    assert kept == {"matrix": (7.0, 0.1), "wide": (1.0, 0.1), "table": (3.0, 0.1), "bias": (0.5, 0.3)}


@torch.no_grad()
def test_another_optimizer_has_its_own_defaults() -> None:
    """Not the betas of the section, nor its arguments."""
    ours, theirs = weights(0), weights(0)
    rule, gradients = rule_of(ours, [{"match": "*", "name": "adam"}], betas=(0.5, 0.6), weight_decay=0.0)
    for step in range(STEPS):
        gradients.update(zip(ours.values(), weights(100 + step).values(), strict=True))
        rule.step(0.01 * (step + 1))
    train_torch(theirs, torch.optim.Adam(list(theirs.values()), betas=(0.9, 0.95)))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-14, atol=1e-15)


def optimizer(*groups: dict[str, Any], **settings: Any) -> Any:
    config = config_of(
        {
            "data": {"path": "unused", "sequence_length": 8},
            "model": {"vocab_size": 67, "num_layers": 2},
            "optimizer": {**settings, "groups": list(groups)},
        }
    )
    return resolve(config, 67)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ({"match": "**.bias", "weight_decy": 0}, r"has 'weight_decy' in group 1 but a .* nearest is weight_decay\."),
        ({"match": "**.bias"}, r"has \{'match': '\*\*\.bias'\} as group 1 but must have a match and a setting for it"),
        ({"weight_decay": 0}, r"as group 1 but must have a match and a setting for it, such as \{match"),
        ({"match": "a", "lr_scale": 0}, r"^optimizer\.groups has lr_scale 0 in group 1 but must be above 0\.$"),
        ({"match": "a", "betas": 0.9}, r"has betas 0\.9 in group 1 but must be a list of two numbers\.$"),
        ({"match": "a", "betas": [0.9, 1.0]}, r"of the betas in group 1, each must be at least 0 and below 1"),
        ({"match": "a", "name": "muo"}, r"has name 'muo' in group 1 but must be one of .*; the nearest is muon\.$"),
        ({"match": "a", "momentum": 0.5}, r"of the momentum in group 1, optimizer\.name is adamw, which does not read"),
        ({"match": "a", "name": "sgd", "nesterov": True}, r"of the nesterov in group 1, optimizer\.momentum is 0"),
        ("x", r"^optimizer\.groups is \['x'\] but must be a list of mappings such as \{match"),
    ],
    ids=str,
)
def test_wrong_groups(group: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        optimizer(group)


@pytest.mark.parametrize(
    ("matches", "sentence"),
    [
        (
            ["*.bias"],
            r"has '\*\.bias' as group 1, which matches no .*; use '\*\*\.bias', as \* is one part",
        ),
        (["block.**"], r"'block\.\*\*' as group 1, which matches no trained weight; the nearest name is 'blocks"),
        (["head.output"], r"no trained weight; head\.output\.weight is tied, so use 'embed\.tokens\.weight'\.$"),
        (["**.bias", "blocks.**", "**"], r"as group 1 but later groups match all its weights, such as blocks\.0\.attn"),
    ],
)
def test_patterns_without_a_weight(matches: list[str], sentence: str) -> None:
    config = optimizer(*({"match": each, "lr_scale": 2.0} for each in matches))
    names = ["embed.tokens.weight", "blocks.0.attn_norm.bias", "blocks.0.mlp.up.weight", "head.norm.weight"]
    with pytest.raises(UserError, match=sentence):
        check_groups(config, model_plan(config.model, 8), names)


def test_a_resolved_config_has_groups_as_they_are_given() -> None:
    group = {"match": "blocks.**", "name": "muon"}
    assert optimizer(group).optimizer.settings()["groups"] == [group]
    config = config_of({"data": {"path": "unused"}, "model": {"vocab_size": 67}})
    assert "groups" not in resolve(config, 67).to_yaml()


def test_planned_memory_is_that_of_the_ranks(pool: WorkerPool) -> None:
    """Of each rank of a pipeline with ZeRO: states by group, none for SGD without momentum."""
    case = grouped((*GROUPS, (("match", "blocks.0.mlp"), ("name", "sgd"))), dp=2, pp=2, dtype="fp32")
    case = Case(**{**vars(case), "settings": (("parallel.zero", 1),)})
    for coordinates, held in pool.run(4, bytes_of_states, case):
        planned = ModelSize(case.config).rank(coordinates.pp, shard_coordinates(case.config.parallel, coordinates))
        assert planned.optimizer == held


def bytes_of_states(case: Case) -> tuple[Any, int]:
    engine = make_engine(case)
    states = [state for _, _, state in engine.optimizer.states() if state.dim()]
    return engine.mesh.coordinates, sum(state.numel() * state.element_size() for state in states)


TWO = [{"match": "blocks.**", "name": "muon"}, {"match": "blocks.1.mlp", "name": "sgd", "momentum": 0.9}]


@pytest.mark.slow
def test_resumes_in_another_layout(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(dtype="fp64", set=(("optimizer.groups", TWO),))
    pool.run(1, train_rank, run.but(steps=6), tmp_path / "uninterrupted")
    pool.run(4, train_rank, run.but(dp=2, tp=2, steps=3), tmp_path / "resumed")
    after = run.but(dp=2, pp=2, steps=6, set=(*run.set, ("parallel.zero", 1)))
    pool.run(4, train_rank, after, tmp_path / "resumed", True)
    assert same(losses_of(tmp_path / "resumed"), losses_of(tmp_path / "uninterrupted"), "fp64")


def test_a_run_keeps_each_weight_s_optimizer(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    pool.run(1, train_rank, small_run.but(steps=2, set=(("optimizer.groups", TWO),)), tmp_path)
    for groups, sentence in (
        (TWO[:1], r"the weight blocks\.1\.mlp\.\S+ had sgd, whose state does not fit muon; set it to \[\{"),
        ([*TWO, {"match": "embed", "name": "lion"}], r"weight embed\.\S+ had adamw, whose state does not fit lion"),
        ([TWO[0], {**TWO[1], "momentum": 0.0}], r"mlp\.\S+ had momentum 0\.9, and sgd resumes one only where"),
        (None, r"optimizer\.groups is \[\] but in .* had muon, whose state does not fit adamw"),
    ):
        with pytest.raises(UserError, match=sentence):
            find_resumption(tmp_path, small_run.but(steps=4, set=(("optimizer.groups", groups),)).config)
    frozen = small_run.but(steps=4, set=(("optimizer.groups", TWO[:1]), ("optimizer.frozen", ["blocks.1.mlp"])))
    assert len(find_resumption(tmp_path, frozen.config).warnings) == 2
    other = [{**each, "lr_scale": 0.1} for each in TWO]
    warnings = find_resumption(tmp_path, small_run.but(steps=4, set=(("optimizer.groups", other),)).config).warnings
    assert len(warnings) == 1
    assert warnings[0].startswith("optimizer.groups is [{")


@pytest.mark.slow
def test_verify_knows_groups(threefold: Command, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "data: {path: unused, sequence_length: 12}\n"
        "model: {num_layers: 4, hidden_size: 16, num_attention_heads: 4, vocab_size: 67}\n"
        "optimizer:\n  groups:\n"
        "  - {match: 'blocks.**', name: muon, weight_decay: 0.3}\n"
        "  - {match: 'blocks.3.**', name: 'torch.optim:RMSprop', lr_scale: 0.1, arguments: {eps: 1.0e-4}}\n"
        "  - {match: '**.bias', weight_decay: 0.5, name: lion, lr_scale: 0.01}\n"
    )
    found = threefold("verify", config, "--layouts", "tp2; dp2 zero3; pp2", "--dtype", "fp64", "--full")
    assert found.status == 0, found.output + found.error
