"""How large a model is under a layout: beside its constructors, published numbers, and what real ranks hold."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.parity import DEEPSEEK, Case, make_engine
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.data.dataset import resolve_without_data
from threefold.errors import UserError
from threefold.models.family import make_model
from threefold.planner.model_size import ModelSize, ShardCoordinates, ShardIndex, shard_coordinates
from threefold.verify.worker_pool import WorkerPool


def sized(model: dict[str, Any], **sections: dict[str, Any]) -> ModelSize:
    given = {"data": {"path": "unused"}, "model": model, **sections}
    return ModelSize(resolve_without_data(Config.model_validate(given)))


GPT2_XL = {"preset": "gpt2-xl", "vocab_size": 50304, "num_attention_heads": 32}
GPT3_175B = {"preset": "gpt3-175b", "vocab_size": 50304}


@pytest.mark.parametrize(
    ("model", "parameters", "schedules"),
    [
        (GPT2_XL, 1_557_686_400, (("1f1b", 4), ("zbv", 2))),
        (GPT3_175B, 174_604_836_864, (("1f1b", 8), ("interleaved", 4))),
    ],
    ids=["gpt2-xl", "gpt3-175b"],
)
def test_stages_and_shards_add_up_to_the_whole(model: dict[str, Any], parameters: int, schedules) -> None:
    """The sizes that Colossal-AI builds. The tied embedding is counted once, and held by both ends."""
    for schedule, pp in schedules:
        size = sized(model, parallel={"pp": pp, "tp": 8, "schedule": schedule})
        assert size.parameters == size.active == parameters
        stages = size.stages()
        assert sum(stage.parameters for stage in stages) == parameters
        assert stages[0].layers[0] == "embed"
        assert stages[-1].layers[-1] == "head"
        tp_parts = [
            size.rank(rank, ShardCoordinates(ShardIndex(tp, 8))).parameters for rank in range(pp) for tp in range(8)
        ]
        hidden = {"gpt2-xl": 1600, "gpt3-175b": 12288}[model["preset"]]
        whole_on_each = {"gpt2-xl": 1024 + 2 + 48 * 6, "gpt3-175b": 2048 + 2 + 96 * 6}[model["preset"]] * hidden
        second_use = 0 if stages[0].pp_rank == stages[-1].pp_rank else 50304 * hidden
        assert sum(tp_parts) == parameters + 7 * whole_on_each + second_use


@pytest.mark.parametrize(
    ("preset", "active"),
    [("mixtral-8x7b", 12_879_925_248), ("qwen1.5-moe-a2.7b", 2_689_173_504), ("qwen3-30b-a3b", 3_353_032_704)],
)
def test_parameters_that_a_token_passes(preset: str, active: int) -> None:
    assert sized({"preset": preset}).active == active


def test_a_model_without_data_needs_a_vocabulary() -> None:
    with pytest.raises(UserError, match=r"^data\.path is unused, which .* and model\.vocab_size is not set, .* 50257"):
        sized({})


WIDE = {"num_layers": 4, "hidden_size": 256, "vocab_size": 2048, "max_position_embeddings": 64, "tie_embeddings": False}


@pytest.mark.parametrize(
    ("zero", "dp", "expected"),
    [
        (0, 2, (8_449_024 * 3, 16_898_048, 33_796_096)),
        (1, 2, (8_449_024 + 8_449_024, 18_477_568, 16_898_048)),
        (1, 4, (4_224_512 + 8_449_024, 18_477_568, 8_449_024)),
        (2, 4, (4_224_512 + 8_449_024, 4_224_512 + 1_579_520, 8_449_024)),
        (3, 4, (4_224_512 + 1_579_520, 4_224_512 + 1_579_520, 8_449_024)),
    ],
)
def test_bytes_are_those_of_the_docs(zero: int, dp: int, expected: tuple[int, int, int]) -> None:
    """The formulas of docs/parallel/data.md, in bytes: masters and whole weights, gradients, optimizer."""
    size = sized(WIDE, parallel={"zero": zero, "dp": dp}, precision={"dtype": "bf16"})
    assert size.parameters == 4_224_512
    assert size.largest_rank(0)[1:4] == expected


class Held(NamedTuple):
    """What a rank of a real engine holds: elements, and bytes."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int


def held(case: Case) -> Held:
    engine = make_engine(case)
    entries = engine.optimizer.entries
    copies = [entry.leaf.nbytes for entry in entries if entry.leaf is not entry.master]
    zero = case.config.parallel.zero
    return Held(
        sum(entry.master.numel() for entry in entries),
        sum(entry.master.nbytes for entry in entries) + sum(copies),
        0 if zero else sum(entry.gradient.nbytes for entry in entries),
        sum(state.nbytes for _, _, state in engine.optimizer.states() if state.dim()),
    )


MOE: tuple[tuple[str, Any], ...] = (
    ("architecture", "llama"),
    ("num_key_value_heads", 6),
    ("head_dim", 4),
    ("num_experts", 4),
    ("expert_ffn_hidden_size", 18),
    ("shared_expert_ffn_hidden_size", 12),
    ("shared_expert_gate", True),
    ("qkv_bias", True),
    ("qk_norm", True),
    ("dense_layers", 1),
)
MIXTURE = Case(model=MOE, positions="rope", sequence=12, tie=False)


@sweep(
    "case",
    [
        Case(dp=2, tp=2, pp=2, dtype="bf16"),
        Case(tp=4, pp=2, schedule="zbv", layers=4),
        replace(MIXTURE, dp=2, tp=2, pp=2, settings=(("parallel.ep", 2),)),
        replace(MIXTURE, dp=3, tp=2, settings=(("parallel.zero", 1),)),
        replace(MIXTURE, dp=4, tp=2, settings=(("parallel.zero", 3), ("parallel.ep", 2))),
        Case(dp=2, cp=2, tp=2, sequence=12, settings=(("parallel.zero", 2), ("parallel.zero_shards", 1))),
        replace(
            MIXTURE,
            dp=8,
            batch=48,
            settings=(("parallel.zero", 2), ("parallel.zero_shards", 4), ("parallel.ep", 2)),
        ),
        replace(MIXTURE, tp=4, model=(*MOE, ("num_key_value_heads", 2), ("expert_ffn_hidden_size", 20))),
        replace(DEEPSEEK, tp=2, pp=2, model=(*DEEPSEEK.model, ("mtp_layers", 1))),
        replace(MIXTURE, dp=2, pp=2, model=(*MOE, ("mtp_layers", 2)), settings=(("parallel.zero", 3),)),
    ],
    ids=[
        "bf16",
        "zbv-tp4",
        "ep2-tp2-pp2",
        "zero1-tp2",
        "zero3-ep2-tp2",
        "hybrid",
        "hybrid-ep2",
        "shared heads",
        "latent, further",
        "further",
    ],
    quick=(0, 4),
)
def test_ranks_hold_what_is_counted(pool: WorkerPool, case: Case) -> None:
    size, layout, parallel = ModelSize(case.config), Layout.from_config(case.config.parallel), case.config.parallel
    for rank, found in enumerate(pool.run(case.world_size, held, case)):
        at = layout.coordinates(rank)
        counted = size.rank(at.pp, shard_coordinates(parallel, at))
        assert (found.parameters, found.optimizer) == (counted.parameters, counted.optimizer), rank
        if not parallel.zero:
            assert found[:4] == counted[:4], rank
        assert counted.bytes <= size.largest_rank(at.pp).bytes


def test_muon_keeps_one_state_of_a_hidden_matrix_and_two_of_other_weights() -> None:
    size = sized({"preset": "gpt2-124m"}, optimizer={"name": "muon"})
    held = size.weights.held(size.weights.layers, ShardCoordinates())
    assert 0 < held.others < held.hidden
    assert size.largest_rank(0).optimizer == 4 * (held.hidden + 2 * held.others)


SMALL = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 6, "vocab_size": 40}
LLAMA = {**SMALL, "architecture": "llama", "num_key_value_heads": 3}
SPARSE = {**LLAMA, "num_experts": 4, "expert_ffn_hidden_size": 16, "dense_layers": 1}


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        {**SMALL, "position_embedding": "rope", "tie_embeddings": False, "ffn_hidden_size": 30},
        {**LLAMA, "qkv_bias": True, "qk_norm": True, "head_dim": 6, "tie_embeddings": True},
        SPARSE,
        {**SPARSE, "shared_expert_ffn_hidden_size": 10, "shared_expert_gate": True},
    ],
    ids=["gpt", "gpt, rotary", "llama", "mixture", "mixture with a shared expert"],
)
def test_shapes_are_those_of_the_model(model: dict[str, Any]) -> None:
    described = sized(model).weights.description
    with torch.device("meta"):
        made = make_model(described.config)
    for layer, weights in described.weights.items():
        named = made.get_submodule(layer).named_parameters()
        found = [(described.plan.whole_name(f"{layer}.{name}"), tuple(weight.shape)) for name, weight in named]
        assert [(weight.name, weight.shape) for weight in weights] == found


def test_layers_alike_are_counted_once() -> None:
    kinds = sized(SPARSE).weights.kinds
    assert kinds["blocks.1"] == kinds["blocks.2"]
    assert len({kinds[layer] for layer in ("embed", "blocks.0", "blocks.1", "head")}) == 4
