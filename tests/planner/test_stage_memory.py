"""The peak memory of stages by cause: against what the engine allocates, and by rules that every layout obeys."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.support.sweep import sweep
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.errors import UserError
from threefold.planner.dry_run import dry_run
from threefold.planner.estimate import usable_memory
from threefold.planner.hardware import find_hardware
from threefold.planner.model_size import ModelSize
from threefold.planner.stage_memory import RESERVE, StageMemory, flights_of, stage_memory

GPT = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 512}
LLAMA = {**GPT, "architecture": "llama", "num_key_value_heads": 4}
MIXTURE = {**LLAMA, "num_experts": 4, "expert_ffn_hidden_size": 96}
LATENT = {**GPT, "architecture": "deepseek", "query_rank": 24, "key_value_rank": 32, "rope_head_dim": 4}
EXPERTS = {**LATENT, "num_experts": 4, "expert_ffn_hidden_size": 96, "dense_layers": 1}
FURTHER = {**LLAMA, "mtp_layers": 2}


def config(model: dict[str, Any] | None = None, dtype: str = "bf16", count: int = 4, **sections: Any) -> Config:
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": count, "device": "cpu", **sections.pop("train", {})}
    given = {
        "data": {"path": "unused", "sequence_length": 1024},
        "model": model or GPT,
        "train": train,
        "precision": {"dtype": dtype},
        **sections,
    }
    return resolve(Config.model_validate(given), 512)


def memory(*args: Any, rank: int = 0, device: str = "cpu", **options: Any) -> StageMemory:
    return stage_memory(config(*args, **options), device)[rank]


SPREAD: dict[str, tuple[dict[str, Any], int, int]] = {
    "alone": ({}, 0, 0),
    "last stage": ({"parallel": {"pp": 2, "tp": 2}, "dtype": "fp32"}, 2, 1),
    "interleaved": ({"parallel": {"pp": 2, "schedule": "interleaved"}, "train": {"recompute": "full"}}, 0, 0),
    "sequence parallel": (
        {"parallel": {"tp": 2, "sequence_parallel": True}, "model": LLAMA, "train": {"recompute": "selective"}},
        0,
        0,
    ),
    "zero 3": ({"parallel": {"dp": 4, "zero": 3}, "model": LLAMA}, 0, 0),
    "experts": ({"parallel": {"dp": 2, "ep": 2}, "model": MIXTURE}, 0, 0),
    "latent": ({"model": LATENT}, 0, 0),
    "latent, sequence parallel": (
        {
            "parallel": {"tp": 2, "sequence_parallel": True},
            "model": LATENT,
            "train": {"recompute": "selective"},
            "dtype": "fp32",
        },
        0,
        0,
    ),
    "latent, gathered": ({"parallel": {"cp": 2}, "model": LATENT, "dtype": "fp32"}, 0, 0),
    "latent, zero 3": ({"parallel": {"dp": 4, "zero": 3}, "model": LATENT}, 0, 0),
    "further": ({"model": FURTHER}, 0, 0),
    "further, last stage": ({"model": FURTHER, "parallel": {"pp": 2}}, 1, 1),
    "further, zbv": ({"model": FURTHER, "parallel": {"pp": 2, "schedule": "zbv"}}, 0, 0),
    "further, zero 3": ({"model": FURTHER, "parallel": {"dp": 2, "pp": 2, "zero": 3}, "dtype": "fp32"}, 1, 1),
    "further, experts": ({"model": {**EXPERTS, "mtp_layers": 1}, "parallel": {"pp": 2, "tp": 2}}, 2, 1),
    "zero 1": ({"parallel": {"dp": 4, "zero": 1}}, 0, 0),
    "zero 2": ({"parallel": {"dp": 2, "zero": 2}, "model": LLAMA, "dtype": "fp32"}, 0, 0),
}


@sweep("name", list(SPREAD), slow=(*range(7), 8, 11, 14))
def test_peaks_are_those_of_dry_runs(name: str) -> None:
    """Of small layers, whose smallest tensors count for more than in large ones: `benchmarks.planner` has these."""
    given, rank, pp_rank = SPREAD[name]
    resolved = config(**given)
    found, run = stage_memory(resolved, "cpu")[pp_rank], dry_run(resolved, rank)
    assert found.tensors == pytest.approx(run.peak_bytes, rel=0.03)


@pytest.mark.parametrize(
    ("width", "parallel", "given"),
    [
        # Of three micro-batches, the buffer of the first layer's reduce-scatter is there when the next one begins.
        (192, {"dp": 8, "zero": 3}, {"dtype": "fp32", "count": 2}),
        # Gradients of layers whose backward pass is done stay until the update.
        (64, {"dp": 2, "zero": 3}, {"count": 1, "tie": False}),
    ],
    ids=["scattered", "reduced"],
)
def test_what_sharded_gradients_leave_behind(width: int, parallel: dict[str, int], given: dict[str, Any]) -> None:
    layers = 384 // width
    model = {**GPT, "num_layers": layers, "hidden_size": width, "num_attention_heads": 4}
    model["tie_embeddings"] = given.pop("tie", True)
    data = {"path": "unused", "sequence_length": 32}
    resolved = config(model, parallel=parallel, data=data, train={"micro_batch_size": 1}, **given)
    assert stage_memory(resolved, "cpu")[0].tensors == pytest.approx(dry_run(resolved, 0).peak_bytes, rel=0.01)


@sweep("length", [512, 1024], slow=(0,))
@sweep("parallel", [{}, {"dp": 2, "pp": 2}, {"dp": 2, "zero": 2}], slow=(1, 2))
def test_peaks_of_exact_runs_have_sample_groups_and_trees(parallel: dict[str, int], length: int) -> None:
    """Attention weights are kept of short sequences; the 4 MiB of a run of heads are left out."""
    wide, data = {**GPT, "num_layers": 4, "hidden_size": 512}, {"path": "unused", "sequence_length": length}
    resolved = config(wide, "fp32", 4, parallel=parallel, train={"exact": True}, data=data)
    found, run = stage_memory(resolved, "cpu")[0], dry_run(resolved, 0)
    assert found.tensors == pytest.approx(run.peak_bytes, rel=0.13)
    other = config(wide, "fp32", 2, parallel=parallel, train={"exact": True, "micro_batch_size": 4}, data=data)
    assert stage_memory(other, "cpu")[0] == found, "sample groups run, whatever the micro-batch size"


def test_states_are_those_that_training_has() -> None:
    resolved = config(parallel={"pp": 2, "tp": 2, "dp": 2})
    size = ModelSize(resolved)
    for found in stage_memory(resolved):
        states = size.largest_rank(found.pp_rank)
        assert (found.weights, found.optimizer) == (states.weights, states.optimizer)
        assert found.gradients >= states.gradients


FROZEN = ["embed.positions", "blocks.0", "blocks.3.*", "blocks.*.attn.qkv"]


@sweep(
    "name",
    ["alone", "last stage", "sequence parallel", "zero 3", "experts", "zero 1", "zero 2"],
    quick=(0,),
    slow=(3, 4, 5),
)
def test_frozen_weights_take_what_dry_runs_have(name: str) -> None:
    """Narrow weights alone. Activations of layers without a backward pass are counted, so that the peak is above."""
    given, rank, pp_rank = SPREAD[name]
    patterns = FROZEN[given.get("model", GPT) is not GPT :]
    resolved = config(**given, optimizer={"frozen": patterns})
    found, run = stage_memory(resolved, "cpu")[pp_rank], dry_run(resolved, rank)
    gathered = run.causes["weights"] - run.parameter_bytes
    shards = resolved.parallel.dp if resolved.parallel.zero == 1 else 1  # which has whole gradients up to the update
    assert (found.weights - gathered, found.gradients) == (run.parameter_bytes, run.gradient_bytes * shards)
    assert 0 <= run.optimizer_bytes - found.optimizer < 1000  # AdamW's number for each weight
    assert run.peak_bytes * 0.97 < found.needed < run.peak_bytes * 1.2
    whole = stage_memory(config(**given), "cpu")[pp_rank]
    assert found.weights + found.gradients + found.optimizer < whole.weights + whole.gradients + whole.optimizer


ADAPTED: dict[str, tuple[dict[str, Any], int, int]] = {
    "alone": ({}, 0, 0),
    "llama, fp32": ({"model": LLAMA, "dtype": "fp32"}, 0, 0),
    "first stage": ({"parallel": {"pp": 2, "tp": 2}, "dtype": "fp32"}, 0, 0),
    "last stage": ({"parallel": {"pp": 2, "tp": 2}, "model": LLAMA}, 2, 1),
    "recompute": ({"parallel": {"pp": 2}, "model": LLAMA, "train": {"recompute": "full"}}, 0, 0),
    "sequence parallel": ({"parallel": {"tp": 2, "sequence_parallel": True}, "model": LLAMA}, 0, 0),
    "zero 1": ({"parallel": {"dp": 4, "zero": 1}, "model": LLAMA}, 0, 0),
    "zero 3": ({"parallel": {"dp": 4, "zero": 3}, "model": LLAMA}, 0, 0),
}


@sweep("name", list(ADAPTED), quick=(1,), slow=(3, 6))
def test_peaks_of_adapters_are_those_of_dry_runs(name: str) -> None:
    given, rank, pp_rank = ADAPTED[name]
    resolved = config(**given, adapter={"rank": 8})
    found, run = stage_memory(resolved, "cpu")[pp_rank], dry_run(resolved, rank)
    # What is recomputed is too little by as many bytes as without adapters.
    assert found.tensors == pytest.approx(run.peak_bytes, rel=0.12 if name == "recompute" else 0.03)
    assert found.tensors < stage_memory(config(**given), "cpu")[pp_rank].tensors


def test_what_saves_memory_does() -> None:
    plain = memory()
    assert memory(train={"recompute": "full"}).peak < memory(train={"recompute": "selective"}).peak <= plain.peak
    assert memory(parallel={"tp": 2}).activations < plain.activations
    assert memory(parallel={"tp": 2, "sequence_parallel": True}).peak < memory(parallel={"tp": 2}).peak
    assert memory(parallel={"cp": 2}).activations < plain.activations
    stages = [memory(parallel={"dp": 4, "zero": zero}).peak for zero in range(4)]
    assert stages == sorted(stages, reverse=True)
    assert memory(LLAMA, train={"loss_chunk_size": 64}).logits < memory(LLAMA, train={"loss_chunk_size": 0}).logits


def test_ranks_hold_what_their_schedule_has_in_flight() -> None:
    first = {
        name: memory(parallel={"pp": 4, "schedule": name}, count=16).activations
        for name in ("1f1b", "interleaved", "zero-bubble", "gpipe")
    }
    assert first["1f1b"] < first["interleaved"] < first["gpipe"]
    stages = stage_memory(config(parallel={"pp": 4}, count=16))
    assert [stage.pp_rank for stage in stages] == [0, 1, 2, 3]
    assert stages[0].activations > stages[1].activations > stages[2].activations


def test_more_micro_batches_than_a_schedule_holds_change_nothing() -> None:
    for schedule in ("1f1b", "interleaved", "zero-bubble"):
        parallel = config(parallel={"pp": 4, "schedule": schedule}, count=16).parallel
        row, chunks = parallel.pipeline_schedule, parallel.stage_chunks
        assert flights_of(row, 4, chunks, 32) == flights_of(row, 4, chunks, 256)


def test_a_gpu_has_less_than_all_of_its_memory() -> None:
    assert usable_memory(replace(find_hardware("a100-80"), memory_bytes=80 << 30)) == (80 << 30) - RESERVE


def test_a_model_of_a_file_has_no_formulas() -> None:
    given = config()
    of_a_file = given.model.model_copy(update={"architecture": "own"})
    with pytest.raises(UserError, match=r"^model\.architecture is own, .* use threefold dry-run"):
        stage_memory(given.model_copy(update={"model": of_a_file}))


def test_it_needs_no_torch() -> None:
    code = "import sys, threefold.planner.stage_memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_cast_logits_are_those_of_the_widest_shard() -> None:
    """The allocator keeps the blocks of narrow logits, those of the first rank's part of the vocabulary."""
    for vocab, columns in ((512, 256), (513, 257)):
        given = config({**GPT, "vocab_size": vocab}, parallel={"tp": 2})
        [found] = stage_memory(given, "cuda", "torchtitan")
        assert found.given_back == 2 * 1024 * columns * 2


MODEL = {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 2048}


@sweep(
    ("parallel", "dtype"),
    [({"dp": 2, "zero": 1}, "bf16"), ({"dp": 4, "zero": 3}, "bf16"), ({"tp": 2, "pp": 2}, "bf16")],
    ids=str,
    slow=(0, 2),
)
def test_each_cause_is_within_3_percent_of_the_peak(parallel: dict[str, Any], dtype: str) -> None:
    sections = {
        "data": {"path": "nowhere", "sequence_length": 256},
        "model": MODEL,
        "parallel": parallel,
        "train": {"global_batch_size": 16, "micro_batch_size": 2},
        "precision": {"dtype": dtype},
    }
    config = resolve(config_of(sections), 2048)
    found = dry_run(config)
    estimated = stage_memory(config, "cpu")[0].by_dry_run
    assert list(estimated) == [*found.causes, "fragmentation"]
    assert sum(found.causes.values()) == found.peak_bytes
    for name, nbytes in found.causes.items():
        assert abs(nbytes - estimated[name]) <= 0.03 * found.peak_bytes, name
