"""`optimizer.frozen` of a config, in every layout, against one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.parity import (
    BIASED_SIZES,
    DEEPSEEK,
    LLAMA,
    MOE,
    Case,
    departures,
    in_layout,
    make_engine,
    shard_of,
    whole_tensors,
    with_recompute,
)
from tests.support.sweep import sweep
from threefold.checkpoint.folder import path_of
from threefold.checkpoint.manifest import Facts, read_manifest
from threefold.checkpoint.save import save_checkpoint
from threefold.errors import UserError
from threefold.models.source import ConfigSource
from threefold.parallel.running_statistics import stored_buffers
from threefold.planner.dry_run import dry_run
from threefold.train.state import checkpoint_tensors, restore_engine

GPT_TIED = Case(dtype="fp64", layers=4, dropout=0.1, steps=2)
LLAMA_4 = replace(LLAMA, layers=4)
MOE_4 = replace(MOE, layers=4)


def freezing(case: Case, *patterns: str) -> Case:
    return replace(case, update=(*case.update, ("optimizer.frozen", patterns)))


FIRST = freezing(GPT_TIED, "embed.positions", "blocks.0", "blocks.1.*", "blocks.*.mlp.down.bias")
TIED = freezing(GPT_TIED, "embed", "head.output.weight", "blocks.0.**", "blocks.1.mlp.up.weight")
BELOW = freezing(LLAMA_4, "embed", "blocks.0", "blocks.1", "blocks.2.attn")
ABOVE = freezing(LLAMA_4, "blocks.3", "head", "blocks.*.attn.q_norm", "blocks.0.mlp.gate_up")
EXPERTS = freezing(MOE_4, "embed.*", "blocks.*.mlp.experts", "blocks.0")
BIASED = freezing(replace(MOE_4, model=BIASED_SIZES), "embed", "blocks.0", "blocks.2")
ROUTERS = freezing(MOE_4, "blocks.*.mlp.router", "blocks.1.mlp.experts.down", "head.norm.*")
LATENT = freezing(DEEPSEEK, "embed", "blocks.*.attn.*_norm", "blocks.1")

LAYOUTS = {
    "dp": FIRST.with_layout(4, 1, 1),
    "tp": TIED.with_layout(1, 2, 1),
    "tp shares sequence": BELOW.with_layout(1, 2, 1, settings=(("parallel.sequence_parallel", True),)),
    "1f1b": TIED.with_layout(1, 1, 4, accumulation=4),
    "pp below": BELOW.with_layout(1, 1, 2, accumulation=4),
    "interleaved": BELOW.with_layout(1, 1, 2, accumulation=4, schedule="interleaved"),
    "zbv": ABOVE.with_layout(1, 1, 2, accumulation=4, schedule="zbv"),
    "zero-bubble": BELOW.with_layout(1, 1, 2, accumulation=4, schedule="zero-bubble"),
    "cp": ABOVE.with_layout(1, 1, 1, cp=2),
    "ep": EXPERTS.with_layout(2, 1, 1, settings=(("parallel.ep", 2),)),
    "ep routers": ROUTERS.with_layout(2, 2, 1, settings=(("parallel.ep", 2),)),
    "zero 1": FIRST.with_layout(2, 1, 1, settings=(("parallel.zero", 1),)),
    "zero 2": TIED.with_layout(2, 1, 1, settings=(("parallel.zero", 2),)),
    "zero 3": EXPERTS.with_layout(4, 1, 1, settings=(("parallel.zero", 3), ("parallel.ep", 2))),
    "recompute": with_recompute(BELOW.with_layout(1, 2, 2), "full"),
    "mixed": BELOW.with_layout(2, 2, 2, settings=(("parallel.zero", 1),)),
    "latent": LATENT.with_layout(1, 2, 2, accumulation=2),
    "biases": with_recompute(BIASED.with_layout(2, 1, 2, accumulation=4), "full"),
}


@sweep("which", list(LAYOUTS), quick=(4, 11), slow=(1, 6, 7, 9, 13, 14))
def test_frozen_weights_stay_and_the_others_are_as_in_one_process(pool, expected, which: str) -> None:
    case = LAYOUTS[which]
    alone, traces = expected(case), pool.run(case.world_size, in_layout, case)
    assert departures(alone, traces, case) == []
    frozen = ConfigSource().load(case.config)[1].frozen
    for trace in traces:
        for name, weight in trace.initial.items():
            assert torch.equal(weight, trace.final[name]) == (name in frozen), name
            assert all((name in gradients) == (name not in frozen) for gradients in trace.gradients), name


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["embedd.*"], "no parameter or module of the model has a name like 'embedd.*'; the nearest is 'embed'."),
        (["embed"], "'head.output.weight' shares the weight of 'embed.tokens.weight' and would be trained; add"),
        (["head.output.*"], "'embed.tokens.weight' shares the weight of 'head.output.weight' and would be trained;"),
        (["**"], "that leaves no parameter to train; leave one out."),
        (["blocks..mlp"], "'blocks..mlp' must be a name in which a part may be * or **"),
    ],
)
def test_what_cannot_be_frozen_is_refused(patterns: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        ConfigSource().load(freezing(GPT_TIED, *patterns).config)
    assert said in str(error.value)
    assert str(error.value).startswith(f"optimizer.frozen is {patterns} but ")


def test_expert_biases_of_frozen_blocks_stay(pool) -> None:
    case = LAYOUTS["biases"]
    moved = {name: change for found in pool.run(4, bias_changes, case) for name, change in found.items()}
    assert {name: change > 0 for name, change in moved.items()} == {
        f"blocks.{number}.mlp.routing.bias": number in (1, 3) for number in (1, 2, 3)
    }


def bias_changes(case: Case) -> dict[str, float]:
    engine = make_engine(case)
    engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    return {name: float(buffer.abs().max()) for name, buffer in stored_buffers(engine.stages).items()}


def test_only_trained_gradients_are_sent() -> None:
    case = replace(FIRST, dp=2, dtype="fp32")
    make, plan = ConfigSource().load(case.config)
    parameters = dict(make().named_parameters(remove_duplicate=False))
    frozen = sum(parameters[name].numel() for name in plan.frozen)

    def sent(case: Case) -> int:
        collectives = dry_run(case.config).collectives
        return sum(each.nbytes for each in collectives if (each.axis, each.operation) == ("dp", "all_reduce"))

    assert 0 < 4 * frozen == sent(replace(case, update=())) - sent(case)


NARROW = replace(BELOW, dtype="bf16", dropout=0.0)


def narrow_weights(case: Case) -> dict[str, tuple[torch.Tensor, torch.dtype, bool]]:
    engine = make_engine(case)
    engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    whole = whole_tensors(engine, "master")
    return {each.name: (whole[each.name], each.leaf.dtype, each.master is each.leaf) for each in engine.model.weights}


@pytest.mark.slow
def test_narrow_frozen_weights_have_no_wide_copy_and_one_value_in_every_layout(pool) -> None:
    frozen = ConfigSource().load(NARROW.config)[1].frozen
    layouts = NARROW, NARROW.with_layout(2, 1, 1, settings=(("parallel.zero", 3),)), NARROW.with_layout(1, 2, 1)
    (first, *_), *others = [pool.run(case.world_size, narrow_weights, case) for case in layouts]
    assert {name for name, (_, _, is_own) in first.items() if is_own} == frozen
    for found in (each for ranks in others for each in ranks):
        for name in frozen:
            value, dtype, is_own = found[name]
            assert is_own, name
            assert dtype == value.dtype == torch.bfloat16, name
            assert torch.equal(value, first[name][0]), name


def saved(case: Case, folder: Path) -> None:
    engine = make_engine(case)
    engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    facts = Facts(1, case.batch, 11, None, None, 0, 0)
    texts = {"config.yaml": case.config.to_yaml()}
    save_checkpoint(folder, facts, checkpoint_tensors(engine), texts, engine.mesh.world)


def states_of(case: Case, folder: Path) -> dict[str, float]:
    engine = make_engine(case)
    restore_engine(engine, read_manifest(path_of(folder, 1)))
    return {f"{name}.{state}": float(value.abs().sum()) for name, state, value in engine.optimizer.states()}


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_weights_that_were_frozen_begin_without_optimizer_state(pool, tmp_path: Path, optimizer: str) -> None:
    update = (("optimizer.momentum", 0.9),) if optimizer == "sgd" else ()
    before = freezing(replace(GPT_TIED, optimizer=optimizer, update=update), "blocks.0", "blocks.1")
    pool.run(2, saved, before.with_layout(1, 2, 1), tmp_path)
    now = replace(before, update=(*update, ("optimizer.frozen", ("blocks.1", "blocks.2"))))
    (states,) = pool.run(1, states_of, now, tmp_path)
    assert states
    assert not any(name.startswith(("blocks.1.", "blocks.2.")) for name in states)
    for name, total in states.items():
        assert (total == 0) == name.startswith("blocks.0."), name


def continued(case: Case, folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Train one step from the checkpoint before it, save the next, and return the weights."""
    engine = make_engine(case)
    if step:
        restore_engine(engine, read_manifest(path_of(folder, step)))
    engine.train_step(shard_of(case, step, engine.mesh.dp.index), step)
    facts = Facts(step + 1, case.batch * (step + 1), 11, None, None, 0, 0)
    save_checkpoint(
        folder, facts, checkpoint_tensors(engine), {"config.yaml": case.config.to_yaml()}, engine.mesh.world
    )
    return whole_tensors(engine, "master")


def in_stage(stage: int) -> dict[str, tuple[tuple[str, int], ...]]:
    return {"settings": (("parallel.zero", stage),)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [replace(TIED, steps=4), replace(GPT_TIED, steps=4, update=(("adapter.rank", 3),))],
    ids=["frozen", "adapters"],
)
def test_runs_go_on_in_another_layout_and_stage(pool, expected, tmp_path: Path, case: Case) -> None:
    """ZeRO 1 and 2 save whole frozen weights, ZeRO 3 their shards."""
    layouts = [
        case.with_layout(2, 1, 1, **in_stage(1)),
        case.with_layout(4, 1, 1, **in_stage(3)),
        case.with_layout(2, 2, 1, **in_stage(2)),
        case.with_layout(1, 1, 2, accumulation=4),
    ]
    for step, layout in enumerate(layouts):
        found = pool.run(layout.world_size, continued, layout, tmp_path, step)
    for name, weight in expected(case).final.items():
        torch.testing.assert_close(found[0].get(name, found[-1].get(name)), weight, rtol=1e-12, atol=1e-13)
