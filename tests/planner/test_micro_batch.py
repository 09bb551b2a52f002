"""The memory of a step, by formula and as measured, and the default micro-batch that follows from it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import Case, make_engine
from tests.support.saved_tensors import recording_saved
from tests.support.sweep import sweep
from tests.train.support import Run
from threefold.config import Config, resolve
from threefold.host import _bytes_of, group_limits, memory
from threefold.launch.checks import resolve_run
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.layers.prediction import look_ahead
from threefold.parallel.leaf import local
from threefold.planner.activations import (
    _under_way,
    activation_bytes,
    block_bytes,
    further_bytes,
    head_bytes,
    largest_micro_batch,
    step_bytes,
)
from threefold.planner.block import block_shapes, describe_model, further_blocks
from threefold.planner.model_size import ModelSize, model_weights
from threefold.planner.rank_block import built_in_attention, rank_block
from threefold.random.dropout import sample_keys
from threefold.verify.worker_pool import WorkerPool

LLAMA: tuple[tuple[str, Any], ...] = (("architecture", "llama"), ("num_key_value_heads", 6), ("head_dim", 4))
NORMED = (*LLAMA, ("qk_norm", True), ("qkv_bias", True))
CAPPED = (*LLAMA, ("attention_softcap", 2.0), ("attention_sinks", True))
LATENT: tuple[tuple[str, Any], ...] = (
    *(("architecture", "deepseek"), ("query_rank", 14), ("key_value_rank", 18)),
    *(("plain_head_dim", 5), ("rope_head_dim", 4), ("value_head_dim", 7)),
)
UNNARROWED = (*LATENT, ("query_rank", 0), ("value_head_dim", 9))
FURTHER = (*NORMED, ("mtp_layers", 2))
EXPERTS = (*LLAMA, ("num_experts", 4), ("expert_ffn_hidden_size", 18), ("dense_layers", 1))
SHARED = (*EXPERTS, ("shared_expert_ffn_hidden_size", 12), ("shared_expert_gate", True))
BASE = Case(layers=2, sequence=18, batch=2, accumulation=1, tie=False, head_dim=4)
ROPE = replace(BASE, positions="rope")
SP = (("parallel.sequence_parallel", True),)


def kept(case: Case) -> tuple[int, int]:
    """Bytes that the last block and the head of a rank keep of a micro-batch."""
    engine = make_engine(case)
    (stage,) = engine.stages
    positions = case.sequence // engine.parallelism.context.cut.shares
    batch = case.config.train.micro_batch_size
    x = torch.randn(batch, positions, case.heads * case.head_dim, dtype=engine.settings.dtype).requires_grad_()
    keys = sample_keys(1, 0, torch.arange(batch)) if case.dropout else None
    documents = torch.zeros(batch, case.sequence, dtype=torch.int64) if case.documents else None
    samples = NOTHING if keys is None and documents is None else SampleInfo(keys, documents)
    labels = torch.zeros(batch, case.sequence // case.cp, dtype=torch.int64)
    head: tuple[Any, ...] = (labels,)
    if depths := case.config.model.mtp_layers:
        head = labels, look_ahead(samples, labels, labels, depths)
    parameters = [local(parameter) for parameter in stage.parameters()]
    found = []
    for layer, arguments in ((f"blocks.{case.layers - 1}", (samples,)), ("head", head)):
        start = x * 1  # a leaf is not an activation
        with recording_saved(parameters) as saved:
            out = stage.get_submodule(layer)(start, *arguments)
        found.append(saved.nbytes)
        out.sum().backward()  # every rank, as there are collectives
    return found[0], found[1]


ALONE = {
    "gpt": BASE,
    "gpt, turned": ROPE,
    "gpt, dropout, turned": replace(ROPE, dropout=0.1),
    "gpt, documents": replace(BASE, documents=True),
    "gpt, dropout, documents": replace(BASE, dropout=0.1, documents=True),
    "gpt, dropout, long": replace(BASE, dropout=0.1, sequence=600),
    "gpt, bf16, documents": replace(BASE, dtype="bf16", documents=True),
    "llama": replace(ROPE, model=LLAMA),
    "llama, fp64": replace(ROPE, model=LLAMA, dtype="fp64"),
    "llama, bf16": replace(ROPE, model=LLAMA, dtype="bf16"),
    "llama, bf16, long": replace(ROPE, model=NORMED, dtype="bf16", sequence=600),
    "llama, norms of heads": replace(ROPE, model=NORMED),
    "llama, dropout": replace(ROPE, model=LLAMA, dropout=0.1),
    "llama, documents": replace(ROPE, model=LLAMA, documents=True),
    "llama, window": replace(ROPE, model=(*LLAMA, ("sliding_window", 5))),
    "llama, bf16, window": replace(ROPE, model=(*LLAMA, ("sliding_window", 5)), dtype="bf16", sequence=600),
    "llama, sinks": replace(ROPE, model=(*LLAMA, ("attention_sinks", True))),
    "llama, bf16, softcap": replace(ROPE, model=CAPPED, dtype="bf16"),
    "llama, dropout, softcap": replace(ROPE, model=CAPPED, dropout=0.1),
    "latent": replace(ROPE, model=LATENT),
    "latent, queries of the input, fp64": replace(ROPE, model=UNNARROWED, dtype="fp64"),
    "latent, bf16": replace(ROPE, model=LATENT, dtype="bf16"),
    "latent, bf16, long": replace(ROPE, model=UNNARROWED, dtype="bf16", sequence=600),
    "latent, dropout": replace(ROPE, model=LATENT, dropout=0.1),
    "latent, documents": replace(ROPE, model=LATENT, documents=True),
    "latent, further": replace(ROPE, model=(*LATENT, ("mtp_layers", 2))),
    "further": replace(ROPE, model=FURTHER),
    "further, fp64": replace(ROPE, model=FURTHER, dtype="fp64"),
    "further, bf16": replace(ROPE, model=FURTHER, dtype="bf16", dropout=0.1),
    "experts": replace(ROPE, model=EXPERTS),
    "experts and a shared one": replace(ROPE, model=SHARED),
    "experts, bf16": replace(ROPE, model=SHARED, dtype="bf16"),
    "gpt, relu": replace(BASE, model=(("activation", "relu"),)),
    "gpt, relu2": replace(BASE, model=(("activation", "relu2"),)),
    "gpt, silu": replace(BASE, model=(("activation", "silu"),)),
    "gpt, quick_gelu": replace(BASE, model=(("activation", "quick_gelu"),)),
}
SPREAD = {
    "gpt, tp": replace(BASE, tp=2),
    "gpt, turned, tp, sequence parallel": replace(ROPE, tp=2, settings=SP),
    "gpt, turned, cp": replace(ROPE, cp=2, sequence=20),
    "llama, tp": replace(ROPE, model=LLAMA, tp=2),
    "llama, tp, sequence parallel": replace(ROPE, model=NORMED, tp=2, settings=SP),
    "llama, tp, shared heads": replace(ROPE, model=(*NORMED, ("num_key_value_heads", 2)), tp=4),
    "llama, cp": replace(ROPE, model=LLAMA, cp=2, sequence=20),
    "gpt, cp, dropout, documents": replace(BASE, cp=2, sequence=20, dropout=0.1, documents=True),
    "llama, cp, documents": replace(ROPE, model=LLAMA, cp=2, sequence=20, documents=True),
    "latent, tp, sequence parallel": replace(ROPE, model=LATENT, tp=2, settings=SP),
    "latent, tp": replace(ROPE, model=UNNARROWED, tp=3),
    "latent, cp": replace(ROPE, model=LATENT, cp=2, sequence=20, documents=True),
    "latent, ring": replace(ROPE, model=LATENT, cp=2, sequence=20, settings=(("parallel.cp_method", "ring"),)),
    "further, documents": replace(ROPE, model=FURTHER, documents=True),
    "further, tp": replace(ROPE, model=FURTHER, tp=2),
    "further, tp, sequence parallel": replace(ROPE, model=FURTHER, tp=2, settings=SP),
    "further, cp": replace(ROPE, model=FURTHER, cp=2, sequence=20),
    "experts, tp": replace(ROPE, model=SHARED, tp=2),
    "experts, tp, sequence parallel": replace(ROPE, model=SHARED, tp=2, settings=SP),
    "experts, ep": replace(ROPE, model=SHARED, dp=2, settings=(("parallel.ep", 2),), batch=4),
}


@sweep("name", [*ALONE, *SPREAD], quick=(0, 4, 7, 11, 13, 18, 19, 26, 32, 38, 44, 47), slow=slice(0, None, 3))
def test_what_is_kept_is_never_more_than_the_formula_says(pool: WorkerPool, name: str) -> None:
    case = {**ALONE, **SPREAD}[name]
    model = describe_model(case.config.model, case.sequence)
    described, further = block_shapes(model)[-1], len(further_blocks(model))
    sizes = rank_block(case.config, described, attention=built_in_attention(case.config, described, "cpu"))
    block, head = block_bytes(sizes), head_bytes(sizes, case.vocab) + further * further_bytes(sizes, case.vocab)
    for found in pool.run(case.world_size, kept, case):
        assert found[0] <= block
        assert found[1] <= head
        if name in ALONE and "experts" not in name:
            assert found == (block, head)


ADAPTER = (("adapter.rank", 3),)
SOME = (("adapter.rank", 5), ("adapter.targets", ("blocks.*.attn.proj", "blocks.*.mlp.up")))
GATES = (("adapter.rank", 5), ("adapter.targets", ("blocks.*.attn.proj", "blocks.*.mlp.gate_up.gate")))
LOWER = (("optimizer.frozen", ("embed", "blocks.0.attn", "blocks.0.attn_norm", "blocks.1.mlp.down", "head.output")),)
FROZEN = {
    "gpt": replace(BASE, update=ADAPTER),
    "gpt, some": replace(BASE, update=SOME),
    "gpt, dropout": replace(BASE, update=ADAPTER, dropout=0.1),
    "gpt, relu": replace(BASE, update=SOME, model=(("activation", "relu"),)),
    "gpt, patterns": replace(BASE, update=LOWER),
    "gpt, bf16": replace(BASE, update=ADAPTER, dtype="bf16", documents=True),
    "llama": replace(ROPE, model=LLAMA, update=ADAPTER),
    "llama, some": replace(ROPE, model=LLAMA, update=GATES, dtype="fp64"),
    "llama, bf16": replace(ROPE, model=LLAMA, update=GATES, dtype="bf16", sequence=600),
    "llama, patterns": replace(ROPE, model=LLAMA, update=LOWER),
    "gpt, tp": replace(BASE, update=ADAPTER, tp=2),
    "llama, tp": replace(ROPE, model=LLAMA, update=ADAPTER, tp=2),
    "llama, tp, sequence parallel": replace(ROPE, model=LLAMA, tp=2, settings=SP, update=GATES),
}


def kept_by_frozen(case: Case) -> tuple[int, int, int]:
    """Bytes that the first and the last block and the head keep; no gradient reaches the embedding."""
    engine = make_engine(case)
    (stage,) = engine.stages
    shape = case.config.train.micro_batch_size, case.sequence // engine.parallelism.context.cut.shares
    keys = sample_keys(1, 0, torch.arange(shape[0])) if case.dropout else None
    documents = torch.zeros(shape[0], case.sequence, dtype=torch.int64) if case.documents else None
    samples = NOTHING if keys is None and documents is None else SampleInfo(keys, documents)
    labels = torch.zeros(shape[0], case.sequence, dtype=torch.int64)
    parameters = [local(parameter) for parameter in stage.parameters()]
    found = []
    for layer, rest, reached in (("blocks.0", samples, False), ("blocks.1", samples, True), ("head", labels, True)):
        x = torch.randn(*shape, case.heads * case.head_dim, dtype=engine.settings.dtype)
        start = x.requires_grad_() * 1 if reached else x
        with recording_saved(parameters) as saved:
            out = stage.get_submodule(layer)(start, rest)
        found.append(saved.nbytes)
        out.sum().backward()
    return tuple(found)


@sweep("name", FROZEN, quick=(0, 4, 6, 11), slow=slice(0, None, 2))
def test_frozen_layers_keep_what_gradients_of_adapters_and_inputs_need(pool: WorkerPool, name: str) -> None:
    """A frozen product keeps no input; no layer before the first trained weight keeps anything for its own input."""
    case = FROZEN[name]
    weights = model_weights(case.config)
    attention = built_in_attention(case.config, weights.blocks[0], "cpu")
    sizes = [rank_block(case.config, block, attention=attention) for block in weights.blocks]
    expected = *map(block_bytes, sizes), head_bytes(sizes[-1], case.vocab, 0, *weights.trains_head)
    first, *others = pool.run(case.world_size, kept_by_frozen, case)
    if "llama, tp" not in name:
        assert first == expected
    for found in (first, *others):
        assert all(each <= formula for each, formula in zip(found, expected, strict=True))
    assert expected[0] < expected[1]


def config(**sections: dict[str, Any]) -> Config:
    given = {"data": {"path": "unused"}, "model": {"vocab_size": 4096}, **sections}
    return Config.model_validate(given)


def room_for(given: Config, micro_batch: int) -> int:
    return step_bytes(resolve(given, 1, micro_batch), "cpu")


def test_the_default_micro_batch_fits_into_the_memory() -> None:
    """To the byte; where nothing fits it is the smallest."""
    given = config(train={"global_batch_size": 12})
    for micro_batch, smaller in ((12, 6), (6, 4), (4, 3), (3, 2), (2, 1), (1, 1)):
        room = room_for(given, micro_batch)
        assert largest_micro_batch(given, 1, room, "cpu") == micro_batch
        assert largest_micro_batch(given, 1, room - 1, "cpu") == smaller
    assert largest_micro_batch(given, 1, 1 << 50, "cpu") == 12


def test_the_loss_goes_in_chunks_where_the_micro_batch_asks_for_it() -> None:
    given = config(train={"global_batch_size": 32}, model={"vocab_size": 50257})
    assert [resolve(given, 1, size).train.loss_chunk_size for size in (2, 8, 32)] == [0, 16384, 4096]
    assert room_for(given, 32) > room_for(given, 8) > room_for(given, 2)


def test_a_gpu_is_given_more_tokens_than_a_cpu() -> None:
    given = config(train={"global_batch_size": 256})
    assert largest_micro_batch(given, 1, 1 << 50, "cpu") == 32
    assert largest_micro_batch(given, 1, 1 << 50, "cuda") == 128


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks", "batches", "expected"),
    [
        # docs/parallel/pipeline.md, and the notes of weights that wait
        ("1f1b", 4, 1, 8, (4, 1)),
        ("gpipe", 4, 1, 8, (8, 8)),
        ("looped-bfs", 4, 2, 8, (8, 8)),
        ("interleaved", 4, 2, 8, (5.5, 2.5)),
        ("zero-bubble", 4, 1, 8, (4 + 1, 1 + 4)),
        ("zero-bubble", 4, 2, 8, (4 + 0.5, 2.5 + 2)),
        ("zbv", 4, 2, 8, (4 + 0.5, 4 + 3.5)),
        ("dualpipev", 4, 2, 8, (4.5 + 0.5, 4.5 + 2)),
        ("1f1b", 4, 1, 2, (2, 1)),
        ("1f1b", 1, 1, 8, (1, 1)),
    ],
)
def test_micro_batches_under_way(
    schedule: str, pp: int, chunks: int, batches: int, expected: tuple[float, ...]
) -> None:
    parallel = {"schedule": schedule, "pp": pp, "stage_chunks": chunks}
    train = {"gradient_accumulation_steps": batches, "global_batch_size": batches}
    resolved = resolve(config(parallel=parallel, train=train), 1)
    assert (_under_way(resolved, 0), _under_way(resolved, pp - 1)) == expected


def test_what_makes_activations_smaller_leaves_room_for_larger_micro_batches() -> None:
    def activations(**sections: dict[str, Any]) -> int:
        resolved = resolve(config(train={"micro_batch_size": 8, **sections.pop("train", {})}, **sections), 1)
        return activation_bytes(resolved, "cpu", ModelSize(resolved), 0)

    plain = activations()
    assert (
        activations(train={"recompute": "full"})
        < activations(train={"recompute": "full", "recompute_every": 2})
        < plain
    )
    assert activations(parallel={"tp": 2, "sequence_parallel": True}) < activations(parallel={"tp": 2}) < plain
    assert activations(parallel={"cp": 2}) < plain
    assert activations(precision={"dtype": "bf16"}) < plain
    assert activations(model={"hidden_dropout": 0.1, "attention_dropout": 0.1, "vocab_size": 4096}) > plain


def test_the_limits_of_control_groups_count(tmp_path: Path) -> None:
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "memory" / "other").mkdir(parents=True)
    (tmp_path / "job" / "memory.max").write_text("3000000000\n")
    (tmp_path / "job" / "step" / "memory.max").write_text("max\n")
    (tmp_path / "memory" / "other" / "memory.limit_in_bytes").write_text("2000000000\n")
    groups = tmp_path / "cgroup"
    groups.write_text("5:cpu,memory:/other\n2:freezer:/x\n0::/job/step\n")
    assert sorted(group_limits("memory", _bytes_of, groups, tmp_path)) == [2_000_000_000, 3_000_000_000]
    assert group_limits("memory", _bytes_of, tmp_path / "nowhere", tmp_path) == []
    assert memory(groups, tmp_path) == 2_000_000_000  # less than any machine that runs this has
    assert memory(tmp_path / "nowhere", tmp_path) > 3_000_000_000


PEAK = """
import resource, sys
from functools import partial
import torch, torch.distributed as dist
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.host import keep_freed_memory
from threefold.models.family import make_model, model_plan
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.train.step import Engine
from threefold.planner.activations import step_bytes
keep_freed_memory()
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 2048, **eval(sys.argv[1])}
train = {"global_batch_size": 16, "micro_batch_size": 16, "device": "cpu"}
config = resolve(Config.model_validate({"data": {"path": "x"}, "model": model, "train": train}), 1)
engine = Engine(partial(make_model, config.model), model_plan(config.model, 256), Mesh(Layout()), config)
tokens = torch.zeros(16, 256, dtype=torch.int64)
for step in range(2):
    engine.train_step(Batch(tokens, tokens, torch.arange(16)), step)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, step_bytes(config, "cpu"))
"""


@sweep(
    "model",
    [{}, {"architecture": "llama", "num_key_value_heads": 2}, {"architecture": "llama", "num_experts": 4}],
    slow=(2,),
    ids=["gpt", "llama", "experts"],
)
def test_a_process_takes_no_more_than_planned(model: dict[str, Any]) -> None:
    """The whole process at its peak, by the system's count."""
    ended = subprocess.run([sys.executable, "-c", PEAK, repr(model)], capture_output=True, text=True, check=True)
    peak, planned = map(int, ended.stdout.split())
    own = 400 << 20  # of a process without a model, as `memory_per_rank` takes it off
    assert 0.6 * planned < peak < planned + own


def test_a_run_is_planned_with_the_memory_of_its_ranks(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Config.model_validate(
        {
            "data": {"path": str(small_run.data), "sequence_length": 16},
            "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
            "train": {"global_batch_size": 8, "eval_every": 0, "device": "cpu"},
        }
    )
    assert resolve_run(given).train.micro_batch_size == 8
    asked = []
    monkeypatch.setattr("threefold.planner.fitting.memory_per_rank", lambda *where: asked.append(where) or 0)
    assert resolve_run(given).train.micro_batch_size == 1
    assert asked == [("cpu", 1)]
