"""Bytes held per rank fall as 1/dp: what is measured is what docs/parallel/data.md says."""

from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.support.parity import Case, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.models.gpt.model import GPT
from threefold.models.source import ConfigSource
from threefold.planner.model_size import ModelSize
from threefold.train.step import Engine

# Every dim divides by 4: positions are two more than the sequence.
EVEN = Case(layers=3, head_dim=4, vocab=64, sequence=10, tie=False, accumulation=2, steps=1)


class Held(NamedTuple):
    """Bytes on a rank: of its shards after a step; of whole tensors, after the last backward pass and at most."""

    masters: int
    frozen: int
    gradients: int
    states: int
    weights_at_end: int
    gradients_at_end: int
    weights_at_most: int
    gradients_at_most: int


def whole_tensors_held(engine: Engine) -> tuple[int, int]:
    """Bytes of gathered weights and of unreduced gradients."""
    groups = [
        group
        for stage in engine.stages
        for module in stage.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    weights = sum(each.untyped_storage().size() for p in parameters for each in p.all_gather_outputs)
    held = [getattr(getattr(p, "_unsharded_param", None), "grad", None) for p in parameters]
    held += [p.unsharded_accumulated_grad for p in parameters]
    return weights, sum(gradient.nbytes for gradient in held if gradient is not None)


def measured(case: Case) -> Held:
    engine = make_engine(case)
    during: list[tuple[int, int]] = [(0, 0)]
    at_end: list[tuple[int, int]] = []
    finish, post_backward, post_forward = (
        engine.gradients.finish,
        FSDPParamGroup.post_backward,
        FSDPParamGroup.post_forward,
    )

    def before_finish() -> None:
        at_end.append(whole_tensors_held(engine))
        finish()

    def before_sharing(self: FSDPParamGroup, *unused: object) -> None:
        during.append(whole_tensors_held(engine))
        post_backward(self, *unused)

    def before_letting_go(self: FSDPParamGroup, *rest: object) -> object:
        during.append(whole_tensors_held(engine))
        return post_forward(self, *rest)

    with (
        patch.object(engine.gradients, "finish", before_finish),
        patch.object(FSDPParamGroup, "post_backward", before_sharing),
        patch.object(FSDPParamGroup, "post_forward", before_letting_go),
    ):
        engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    assert whole_tensors_held(engine) == (0, 0)  # nothing whole is left after a step
    entries = engine.optimizer.entries
    return Held(
        sum(entry.master.untyped_storage().nbytes() for entry in entries),
        sum(each.leaf.untyped_storage().nbytes() for each in engine.model.weights if not each.is_trained),
        sum(entry.gradient.nbytes for entry in entries),
        sum(state.nbytes for _, _, state in engine.optimizer.states() if state.dim()),
        *at_end[0],
        *(max(each) for each in zip(*during, strict=True)),
    )


def sizes(case: Case) -> tuple[int, int]:
    """Elements of the whole model, and of its largest layer."""
    model = GPT(case.config.model)
    layers = [model.embed, *model.blocks, model.head]
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    return sum(counts), max(counts)


@sweep("dtype", ["fp32", "bf16"], quick=(1,))
@sweep("dp", [2, 4], quick=(0,), slow=())
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_per_rank_are_those_of_the_formula(pool, stage: int, dp: int, dtype: str) -> None:
    case = replace(EVEN, dp=dp, dtype=dtype, settings=(("parallel.zero", stage),))
    model, layer = sizes(case)
    narrow = {"fp32": 4, "bf16": 2}[dtype]
    for held in pool.run(dp, measured, case):
        assert held.masters == held.gradients == 4 * model / dp
        assert (held.states, held.frozen) == (8 * model / dp, 0)
        if stage < 3:
            assert held.weights_at_end == held.weights_at_most == narrow * model
        else:
            assert held.weights_at_end == 0
            assert held.weights_at_most == narrow * layer
        if stage == 1:
            assert held.gradients_at_end == 4 * model
        else:
            assert held.gradients_at_end == 0
            assert held.gradients_at_most == narrow * layer


FROZEN = replace(EVEN, update=(("optimizer.frozen", ("embed", "blocks.0", "blocks.*.attn", "blocks.2.mlp.up")),))
ADAPTED = replace(EVEN, update=(("adapter.rank", 4),))


@sweep(
    ("case", "dtype"),
    [(case, dtype) for case in (FROZEN, ADAPTED) for dtype in ("fp32", "bf16")],
    quick=(3,),
    ids=["fp32", "bf16", "adapters fp32", "adapters bf16"],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_weights_have_bytes_of_their_own_alone(pool, stage: int, case: Case, dtype: str) -> None:
    """They are whole in stages 0 to 2, in which they are not gathered, and shards in stage 3."""
    case = replace(case, dp=2, dtype=dtype, settings=(("parallel.zero", stage),))
    make, plan = ConfigSource().load(case.config)
    sizes = {name: parameter.numel() for name, parameter in make().named_parameters()}
    frozen = sum(size for name, size in sizes.items() if name in plan.frozen)
    trained = sum(sizes.values()) - frozen
    assert frozen
    narrow, shards = {"fp32": 4, "bf16": 2}[dtype], 2 if stage else 1
    size = ModelSize(case.config)
    computed = size.rank(0, size.largest_place(0))
    for held in pool.run(2, measured, case):
        assert held.masters == held.gradients == 4 * trained / shards
        assert held.states == computed.optimizer == 8 * trained / shards
        assert held.frozen == narrow * frozen / (2 if stage == 3 else 1)
        copies = trained * narrow if stage == 0 and dtype == "bf16" else 0
        assert computed.weights == held.masters + held.frozen + held.weights_at_most + copies
        if stage in (1, 2):
            assert held.weights_at_end == held.weights_at_most == narrow * trained
        if stage == 1:
            assert held.gradients_at_end == 4 * trained
