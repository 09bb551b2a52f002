"""The sharding rules as data: what is cut along which dim, in which units, and which settings an axis has to divide."""

import subprocess
import sys

import pytest
import torch

from tests.support.parity import LLAMA, Case, over
from threefold.models.family import make_model, model_plan
from threefold.models.sharding import Column, OverExperts, Row

CASES = {"gpt": Case(), "rope": Case(positions="rope", head_dim=4), "llama": LLAMA, "mixture": over(1, 1, 1)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_units_fill_the_dim_that_is_cut(case: Case) -> None:
    """Of every parameter with units: as many as the config's setting says, of the size that they say."""
    config = case.config.model
    plan = model_plan(config, case.sequence)
    with torch.device("meta"):
        model = make_model(config)
    checked = 0
    for name, parameter in model.named_parameters():
        rule = plan.split_of(name)
        own = name.rpartition(".")[2]
        assert rule is not None
        for axis, unit in rule.units(own).items():
            dim = rule.cut_dim(own, axis)
            assert dim is not None
            assert unit.count * unit.size == parameter.shape[dim], name
            assert unit.count == getattr(config, unit.setting)
            checked += 1
        if isinstance(rule, Column | Row | OverExperts) and not name.startswith("head."):
            assert rule.units(own) or not rule.cuts(own), name
        assert all(cut.dim < parameter.dim() for cut in rule.cuts(own))
    assert checked >= 4 * case.layers


def test_settings_that_an_axis_has_to_divide() -> None:
    def divided(case: str, axis: str) -> dict[str, int]:
        plan = model_plan(CASES[case].config.model, CASES[case].sequence)
        return {setting: unit.count for setting, unit in plan.units(axis).items()}

    assert divided("gpt", "tp") == {"num_attention_heads": 12, "ffn_hidden_size": 60}
    assert divided("gpt", "ep") == {}
    assert list(divided("llama", "tp")) == [
        "num_attention_heads",
        "num_key_value_heads",
        "ffn_hidden_size",
    ]
    assert "expert_ffn_hidden_size" in divided("mixture", "tp")
    assert list(divided("mixture", "ep")) == ["num_experts"]


def test_the_rules_need_no_torch() -> None:
    """Config checks read them, and a config error must not wait for torch."""
    script = "import sys, threefold.models.sharding, threefold.models.plan\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
