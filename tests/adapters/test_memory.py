"""Bytes of a model with adapters, as counted from shapes and as the training code has them."""

from dataclasses import replace

import pytest

from tests.support.parity import LLAMA, MOE, Case
from threefold.comm.layout import Coordinates
from threefold.config import Config
from threefold.config.loading import config_of as made_config
from threefold.errors import UserError
from threefold.planner.dry_run import dry_run
from threefold.planner.fitting import fitting_micro_batch
from threefold.planner.model_size import ModelSize, described_blocks, shard_coordinates


def config_of(case: Case, dtype: str, **layout: object) -> Config:
    update = (("adapter.rank", 3), ("adapter.targets", ("blocks.**", "head.**")))
    return replace(case, update=update, dtype=dtype, documents=False, dropout=0.0, **layout).config


@pytest.mark.parametrize(
    ("case", "dtype", "layout"),
    [
        (LLAMA, "fp32", {"tp": 2}),
        (LLAMA, "bf16", {"tp": 3, "dp": 2}),
        (LLAMA, "bf16", {"pp": 3, "accumulation": 3}),
        (MOE, "bf16", {"tp": 2, "dp": 2, "settings": (("parallel.ep", 2),)}),
    ],
    ids=str,
)
def test_frozen_weights_have_no_gradients_and_no_optimizer_state(case: Case, dtype: str, layout: dict) -> None:
    config = config_of(case, dtype, **layout)
    model, place = ModelSize(config), shard_coordinates(config.parallel, Coordinates(0, 0, 0, 0))
    size, report = model.rank(0, place), dry_run(config)
    assert size.gradients == 4 * model.weights.held(model.layers_of_rank(0), place).trained > 0
    assert (size.parameters, size.gradients, size.weights) == (
        report.parameters,
        report.gradient_bytes,
        report.parameter_bytes,
    )
    counters = report.optimizer_bytes - size.optimizer
    assert 0 <= counters < 4 * 100  # of AdamW, a number for each trained weight


@pytest.mark.parametrize(
    ("case", "update", "said"),
    [
        (MOE, (), r"^The adapter of blocks\.1\.attn\.qkv has no formulas in the planner"),
        (LLAMA, (("adapter.targets", ("head.output",)),), r"^The adapter of head\.output has no formulas"),
        (LLAMA, (("adapter.dora", True),), r"^adapter\.dora is true but the planner has no formulas"),
        (LLAMA, (("adapter.dropout", 0.5),), r"^adapter\.dropout is 0\.5 but the planner has no formulas"),
    ],
)
def test_the_planner_refuses_adapters_that_it_does_not_know(case: Case, update: tuple, said: str) -> None:
    given = replace(case, update=(("adapter.rank", 3), *update), documents=False, dropout=0.0).config
    with pytest.raises(UserError, match=said):
        described_blocks(given)


def test_no_micro_batch_is_derived_without_formulas() -> None:
    sections = {
        "data": {"path": "none", "sequence_length": 16},
        "model": {"architecture": "llama", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2},
        "adapter": {"rank": 2},
        "train": {"global_batch_size": 6},
    }
    assert fitting_micro_batch(made_config(sections), 50, "cpu", 1) == 6
    sections["adapter"]["dora"] = True
    assert fitting_micro_batch(made_config(sections), 50, "cpu", 1) is None
