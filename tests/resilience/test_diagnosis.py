"""One bad value on one rank: the error names step, samples, micro-batch, module and rank, and data or hardware."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.resilience.faults import Fault, train_with
from tests.support.sweep import sweep
from tests.train.support import Run, manifest
from threefold.checkpoint.folder import path_of
from threefold.comm.layout import Layout
from threefold.data.dataset import open_dataset
from threefold.random import samples_at
from threefold.report.metrics import read_metrics
from threefold.resilience.diagnosis import _digest
from threefold.verify.worker_pool import WorkerError, WorkerPool

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
    config, replica = run.config, Layout.from_config(run.config.parallel).coordinates(fault.rank).dp
    rows = config.train.global_batch_size // run.dp
    size = rows // MICRO_BATCHES
    first = (fault.step - 1) * config.train.global_batch_size + replica * rows + fault.micro_batch * size
    samples = open_dataset(config).samples("train")
    return samples_at(np.arange(first, first + size), len(samples), config.train.seed).tolist()


def check(pool: WorkerPool, small_run: Run, place: Place, run_dir: Path) -> str:
    """The sentence, after everything that it must name was found in it."""
    run, fault = run_of(small_run, place), place.fault
    sentence = sentence_of(pool, run, [fault], run_dir)
    assert sentence.startswith(f"Training diverged at step {fault.step}: the loss is ")
    value = "a NaN" if fault.number != fault.number else "an Inf"
    direction = "forward" if fault.kind in ("output", "value") else "backward"
    replica = f" of replica {Layout.from_config(run.config.parallel).coordinates(fault.rank).dp}" if run.dp > 1 else ""
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
    "deferred": Place(
        {"pp": 2},
        Fault("deferred", "blocks.2.mlp.down", 0, 2, 1),
        grad("blocks.2.mlp.down.weight"),
        (("parallel.schedule", "zero-bubble"),),
    ),
    "value": Place({"dp": 2}, Fault("value", "blocks.1.mlp.up", 1, 2), out("blocks.1.mlp.up")),
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


SLOW = ("dp2tp2", "pp2", "deferred", "zero3", "ep2")
"""Of which the first two are quick; the others are a sweep."""


@sweep("name", [name if name in SLOW else pytest.param(name, marks=pytest.mark.sweep) for name in PLACES], quick=(0, 1))
def test_the_place_of_one_bad_value_is_named(pool: WorkerPool, small_run: Run, tmp_path: Path, name: str) -> None:
    check(pool, small_run, PLACES[name], tmp_path)


LAYOUTS: list[tuple[dict[str, int], tuple[tuple[str, Any], ...]]] = [
    ({"dp": 2}, ()),
    ({"tp": 2}, ()),
    ({"pp": 2}, ()),
    ({"dp": 2, "tp": 2, "pp": 2}, ()),
    ({"dp": 2, "tp": 2}, (("parallel.sequence_parallel", True),)),
    ({"dp": 4}, (("parallel.zero", 1),)),
    ({"dp": 2, "tp": 2}, (("parallel.zero", 2),)),
    ({"dp": 2}, (("parallel.zero", 3),)),
    ({"dp": 2, "pp": 2}, (("parallel.schedule", "gpipe"),)),
]


def random_place(seed: int) -> Place:
    draw = Random(seed)
    axes, settings = draw.choice(LAYOUTS)
    layout = Layout(**axes)
    block = draw.choice((0, 2))
    place = {axis: draw.randrange(layout.size(axis)) for axis in ("dp", "tp")}
    rank = layout.rank_of(**place, pp=0 if block == 0 else layout.pp - 1)  # the first block is on the first stage
    kind = draw.choice(("output", "gradient", "weight"))
    module = f"blocks.{block}." + draw.choice(("mlp.up", "attn.qkv", "attn_norm", "mlp_norm"))
    number = draw.choice((NAN, INF, -INF))
    fault = Fault(kind, module, rank, draw.choice((2, 3)), draw.randrange(MICRO_BATCHES), number)
    words = {"output": out(module), "gradient": grad(out(module)), "weight": grad(f"{module}.weight")}
    return Place(axes, fault, words[kind], settings)


@pytest.mark.sweep
def test_compiled_layers_are_checked_as_they_are_written(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    fault = Fault("value", "blocks.1.mlp.up", 0, 2)
    check(pool, small_run, Place({}, fault, out("blocks.1.mlp.up"), (("train.compile", True),)), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(20))
def test_twenty_of_twenty_random_places_are_named(pool: WorkerPool, small_run: Run, tmp_path: Path, seed: int) -> None:
    check(pool, small_run, random_place(seed), tmp_path)


@sweep(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("output", "gradient")), "weight", "summed"],
    quick=(3,),
)
def test_what_a_second_run_does_not_have_is_the_hardware(
    pool: WorkerPool, small_run: Run, tmp_path: Path, kind: str
) -> None:
    """A bad value in the first run of a step alone; `summed` in the memory of a rank whose gradients another counts."""
    run = run_of(small_run, PLACES["value"])
    sentence = sentence_of(pool, run, [Fault(kind, "blocks.1.mlp.up", 1, 3, runs=(0,))], tmp_path)
    begins = "Training diverged at step 3: the loss is NUMBER and the gradient norm nan; "
    runs = "a second run of the step, on the same weights and samples, was finite (loss NUMBER)"
    where = ", with other bits on rank 1 (dp 1) alone" if kind == "summed" else ""
    cause = ", so the hardware is the likely cause, not data or model; "
    words = re.escape(begins + runs + where + cause).replace("NUMBER", r"(nan|\d+\.\d+)")
    assert re.match(words, sentence), sentence
    assert "lower optimizer.lr" not in sentence


@sweep("number", [1e30, pytest.param(1e18, marks=pytest.mark.sweep)], quick=(0,))
def test_a_gradient_that_is_too_large_for_its_norm(
    pool: WorkerPool, small_run: Run, tmp_path: Path, number: float
) -> None:
    """Finite, but its square is not."""
    run = run_of(small_run, PLACES["value"])
    faults = [Fault("weight", "blocks.1.mlp.up", 1, 2, number=number)]
    if number < 1e19:  # whose square is
        pool.run(2, train_with, faults, run, tmp_path)
        return
    sentence = sentence_of(pool, run, faults, tmp_path)
    assert (
        "; loss and gradients are finite, and the gradient of blocks.1.mlp.up.weight, with values up to 1e+30, "
        "overflows the norm; a second run of the step gave the same bits, so data or model is the cause" in sentence
    )


@pytest.mark.sweep
def test_what_differs_in_a_second_run_is_told(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    faults = [Fault("gradient", "blocks.0.mlp.up", 1, 2), Fault("weight", "blocks.2.mlp.up", 0, 2, 0, 1.0, (0,))]
    sentence = sentence_of(pool, run_of(small_run, PLACES["value"]), faults, tmp_path)
    assert "in the gradient of the output of blocks.0.mlp.up" in sentence
    assert (
        "a second run of the step was not finite either, but had other bits on all ranks, so the hardware" in sentence
    )


def test_an_overflow_at_a_loss_scale_is_no_bad_step(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """fp16: the step is skipped and the scale halves, as ever; nothing is run again, and no policy counts it."""
    run = run_of(small_run, PLACES["value"]).but(dtype="fp16")
    pool.run(2, train_with, [Fault("weight", "blocks.1.mlp.up", 1, 2, number=INF)], run, tmp_path)
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [line["skipped"] for line in lines] == [False, True, False, False]
    assert not any("reason" in line for line in lines)
    assert manifest(path_of(tmp_path, 4))["anomalies"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["value", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("output", "gradient"))]
)
def test_a_nan_that_no_loss_scale_mends_is_named(pool: WorkerPool, small_run: Run, tmp_path: Path, kind: str) -> None:
    """fp16: the scale halves from 4 to 1, as for an overflow, and the next step is told in words."""
    run = run_of(small_run, PLACES["value"])
    run = run.but(dtype="fp16", set=(*run.set, ("precision.loss_scale", 4.0)))
    faults = [Fault(kind, "blocks.1.mlp.up", 1, step) for step in (2, 3, 4)]
    sentence = sentence_of(pool, run, faults, tmp_path)
    assert sentence.startswith("Training diverged at step 4: the loss is ")
    where, direction = out("blocks.1.mlp.up"), "backward" if kind == "gradient" else "forward"
    where = grad(where) if kind == "gradient" else where
    assert f" is a NaN in {where}, in the {direction} pass of micro-batch 0" in sentence
    assert "on rank 1 (dp 1)" in sentence
    assert [line["skipped"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [False, True, True]


def test_a_nan_is_a_nan_whatever_its_bits() -> None:
    """A kernel may give other payloads in a second run."""
    quiet = torch.tensor([1.0, float("nan")])
    other = torch.tensor([0x3F800000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    zero = torch.zeros(())
    one, two, three = (
        _digest(SimpleNamespace(optimizer=SimpleNamespace(entries=[SimpleNamespace(gradient=each)])), zero)
        for each in (quiet, other, quiet.flip(0))
    )
    assert one == two != three
