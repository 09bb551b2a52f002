"""Frozen parameters (`requires_grad_(False)`) in every layout, against the plain model in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.custom_models import FROZEN, CustomCase, frozen_case, in_layout, one_process
from tests.support.parity import Trace, departures
from tests.support.sweep import sweep
from threefold.comm.layout import Coordinates
from threefold.config import Config
from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.planner.dry_run import dry_run
from threefold.planner.model_size import ModelSize, shard_coordinates

ALONE: dict[tuple[str, str, str], Trace] = {}


@pytest.fixture(scope="module")
def alone(pool) -> Callable[[CustomCase, str], Trace]:
    def trace(own: CustomCase, which: str) -> Trace:
        key = (which, own.case.dtype, own.case.optimizer)
        if key not in ALONE:
            ALONE[key] = pool.run(1, one_process, own)[0]
        return ALONE[key]

    return trace


LAYOUTS = [
    {"dp": 2, "tp": 2, "accumulation": 3},
    {"pp": 4, "accumulation": 4, "optimizer": "adamw"},
    {"pp": 2, "dp": 2, "accumulation": 4, "schedule": "zero-bubble"},
    {"pp": 2, "tp": 2, "accumulation": 4, "schedule": "interleaved", "optimizer": "muon"},
    {"pp": 2, "accumulation": 4, "schedule": "dualpipev", "optimizer": "lion"},
    {"dp": 4, "accumulation": 2, "settings": (("parallel.zero", 1),), "optimizer": "adamw"},
    {"dp": 2, "pp": 2, "accumulation": 4, "settings": (("parallel.zero", 2),)},
    {"dp": 2, "tp": 2, "accumulation": 2, "settings": (("parallel.zero", 3),)},
    {"dp": 2, "pp": 2, "accumulation": 2, "settings": (("parallel.zero", 3), ("train.recompute", "full"))},
    {"dp": 2, "tp": 2, "pp": 2, "accumulation": 2, "settings": (("train.recompute", "full"),)},
]


@sweep(
    ("which", "layout", "dtype"),
    [(which, layout, dtype) for dtype in ("fp64", "fp32") for which in FROZEN for layout in LAYOUTS],
    quick=(9, 12, 27, 31),
    slow=slice(0, 40, 7),
)
def test_frozen_parameters_are_as_in_one_process(pool, alone, which: str, layout: dict, dtype: str) -> None:
    own = frozen_case(which, dtype=dtype, **layout)
    expected = alone(own, which)
    traces = pool.run(own.case.world_size, in_layout, own)
    assert departures(expected, traces, own.case) == []
    for trace in traces:
        for name, weight in trace.initial.items():
            if name in own.plan.frozen:
                assert torch.equal(weight, trace.final[name]), name
                assert all(name not in gradients for gradients in trace.gradients)


FILE = """
from torch import nn
from threefold import Column, Plan, Replicated, Row, Vocab


class Layer(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.requires_grad_(not frozen)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Half(nn.Module):
    plan = Plan(
        ["embed", "blocks.*", "head"],
        {"embed": Vocab(), "blocks.*.up": Column(), "blocks.*.down": Row(), "head": Vocab()},
    )

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16).requires_grad_(False), nn.Linear(16, 48, bias=False)
        self.blocks = nn.ModuleList(Layer(number % 2) for number in range(4))


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
"""


def half_frozen(file: Path, dtype: str, **parallel: int) -> Config:
    sections = {
        "data": {"path": "nowhere", "sequence_length": 8},
        "model": {"architecture": "own", "file": f"{file}:Half", "vocab_size": 48},
        "parallel": {"dp": 2, **parallel},
        "train": {"global_batch_size": 8, "micro_batch_size": 2},
        "precision": {"dtype": dtype},
    }
    return resolve(config_of(sections), 48)


@pytest.mark.parametrize(("dtype", "parallel"), [("fp32", {}), ("bf16", {"tp": 2}), ("fp32", {"zero": 2})], ids=str)
def test_they_have_no_gradients_and_no_optimizer_state(tmp_path: Path, dtype: str, parallel: dict[str, int]) -> None:
    """The bytes of a rank as counted from shapes are those of a step of the training code."""
    (file := tmp_path / "half.py").write_text(FILE)
    config = half_frozen(file, dtype, **parallel)
    size = ModelSize(config).rank(0, shard_coordinates(config.parallel, Coordinates(0, 0, 0, 0)))
    report = dry_run(config)
    steps = 4 * 9  # of AdamW, a number for each trained weight
    assert (size.optimizer + steps, size.parameters) == (report.optimizer_bytes, report.parameters)
    trained = 2 * (16 * 32 + 32 + 32 * 16 + 16) + 48 * 16
    frozen = trained
    if not parallel:
        assert (size.gradients, size.optimizer, size.weights) == (4 * trained, 8 * trained, 4 * (trained + frozen))
    if "zero" not in parallel:
        assert (size.gradients, size.weights) == (report.gradient_bytes, report.parameter_bytes)
