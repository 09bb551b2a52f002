"""One bad value on one rank: the error names step, samples, micro-batch, module and rank, and data or hardware."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import Fault, train_with
from tests.support.sweep import sweep
from tests.train.support import Run
from threefold.comm.layout import Layout
from threefold.data.dataset import open_dataset
from threefold.launch.worker_pool import WorkerError, WorkerPool
from threefold.random.permutation import samples_at

NAN, INF = float("nan"), float("inf")
MICRO_BATCHES = 2
EXPERTS = (
    "model",
    {"architecture": "llama", "num_layers": 2, "hidden_size": 24, "num_attention_heads": 4}
    | {
        "vocab_size": 301,
        "num_experts": 4,
        "expert_ffn_hidden_size": 20,
        "experts_per_token": 2,
    },
)


@dataclass(frozen=True)
class Place:
    """A fault in a layout, and the words that name it."""

    layout: dict[str, int]
    fault: Fault
    words: str
    settings: tuple[tuple[str, Any], ...] = ()
    sections: tuple[tuple[str, Any], ...] = field(default=())


def run_of(small_run: Run, place: Place) -> Run:
    axes = {axis: size for axis, size in place.layout.items() if axis != "ep"}
    own = () if "ep" not in place.layout else (("parallel.ep", place.layout["ep"]),)
    settings = (("train.gradient_accumulation_steps", MICRO_BATCHES), ("checkpoint.every", 1), *own, *place.settings)
    return small_run.but(steps=4, set=settings, sections=place.sections, **axes)


def sentence_of(pool: WorkerPool, run: Run, faults: list[Fault], run_dir: Path) -> str:
    with pytest.raises(WorkerError) as caught:
        pool.run(run.world_size, train_with, faults, run, run_dir)
    sentence = str(caught.value.error)
    assert "\n" not in sentence
    return sentence


def samples_of(run: Run, fault: Fault) -> list[int]:
    """The samples of the fault's micro-batch: from the permutation itself, for the rows of its replica."""
    config, replica = run.config, Layout.of(run.config.parallel).coordinates(fault.rank).dp
    rows = config.train.global_batch_size // run.dp
    size = rows // MICRO_BATCHES
    first = (fault.step - 1) * config.train.global_batch_size + replica * rows + fault.micro_batch * size
    samples = open_dataset(config).samples("train")
    import numpy as np

    return samples_at(np.arange(first, first + size), len(samples), config.train.seed).tolist()


def check(pool: WorkerPool, small_run: Run, place: Place, run_dir: Path) -> str:
    """The sentence, after everything that it must name was found in it."""
    run, fault = run_of(small_run, place), place.fault
    sentence = sentence_of(pool, run, [fault], run_dir)
    assert sentence.startswith(f"Training diverged at step {fault.step}: the loss is ")
    value = "a NaN" if fault.number != fault.number else "an Inf"
    direction = "forward" if fault.kind in ("output", "value") else "backward"
    replica = f" of replica {Layout.of(run.config.parallel).coordinates(fault.rank).dp}" if run.dp > 1 else ""
    assert f"the first value that is not finite is {value} in {place.words}, in the {direction} pass of " in sentence
    assert f"pass of micro-batch {fault.micro_batch}{replica} (" in sentence
    listed = re.search(r"\(samples? ([^()]*)\)", sentence)
    assert listed is not None
    assert [int(number) for number in re.findall(r"\d+", listed[1])] == samples_of(run, fault)
    if run.world_size > 1:
        assert re.search(rf"\) on rank {fault.rank} \((dp|pp|tp|cp) ", sentence), sentence
    assert "a second run of the step gave the same bits, so data or model is the cause, not the hardware" in sentence
    assert f"--resume starts from {run_dir / 'checkpoints' / f'step_{fault.step - 1:08d}'}" in sentence or (
        "no good step followed" in sentence
    )
    return sentence


def out(module: str) -> str:
    return f"the output of {module}"


def grad(name: str) -> str:
    return f"the gradient of {name}"


PLACES = {
    "dp2tp2": Place({"dp": 2, "tp": 2}, Fault("output", "blocks.1.mlp.up", 3, 3, 1, INF), out("blocks.1.mlp.up")),
    "pp2": Place({"dp": 2, "pp": 2}, Fault("weight", "blocks.2.mlp.down", 3, 2, 0), grad("blocks.2.mlp.down.weight")),
    "one": Place({}, Fault("gradient", "blocks.0.attn_norm", 0, 2, 1), grad("the output of blocks.0.attn_norm")),
    "tp2": Place({"tp": 2}, Fault("gradient", "blocks.1.mlp.up", 1, 3, 0), grad("the output of blocks.1.mlp.up")),
    "whole": Place({"tp": 2}, Fault("weight", "blocks.1.attn_norm", 1, 2, 1), grad("blocks.1.attn_norm.weight")),
    "zbv": Place(
        {"pp": 2},
        Fault("gradient", "blocks.1.mlp.up", 1, 2, 1),
        grad("the output of blocks.1.mlp.up"),
        (("parallel.schedule", "zbv"),),
    ),
    "zero2": Place(
        {"dp": 2},
        Fault("weight", "blocks.1.mlp.up", 1, 3, 1, INF),
        grad("blocks.1.mlp.up.weight"),
        (("parallel.zero", 2),),
    ),
    "zero3": Place(
        {"dp": 2, "tp": 2},
        Fault("output", "blocks.0.attn.core", 2, 2),
        out("blocks.0.attn.core"),
        (("parallel.zero", 3),),
    ),
    "recompute": Place(
        {"dp": 2},
        Fault("gradient", "blocks.1.mlp.up", 1, 2, 1),
        grad("the output of blocks.1.mlp.up"),
        (("train.recompute", "full"),),
    ),
    "cp2": Place({"cp": 2}, Fault("output", "blocks.2.mlp.up", 1, 2, 1), out("blocks.2.mlp.up")),
    "bf16": Place(
        {"dp": 2},
        Fault("weight", "blocks.1.mlp.up", 1, 2, 1),
        grad("blocks.1.mlp.up.weight"),
        (("precision.dtype", "bf16"), ("optimizer.clip_grad_norm", 0.0)),
    ),
    "ep2": Place(
        {"dp": 2, "ep": 2}, Fault("output", "blocks.1.mlp.router", 1, 2, 1), out("blocks.1.mlp.router"), (), (EXPERTS,)
    ),
}


@sweep("name", list(PLACES), quick=(0, 1))
def test_the_place_of_one_bad_value_is_named(pool: WorkerPool, small_run: Run, tmp_path: Path, name: str) -> None:
    check(pool, small_run, PLACES[name], tmp_path)
