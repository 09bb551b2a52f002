"""One process beside torch's own optimizers, and Lion beside its formulas: the same numbers, step by step."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.updates import HIDDEN, SHAPES, STEPS, train_torch, weights
from threefold.config import OptimizerConfig
from threefold.config.optimizer import OPTIMIZERS, hyper_parameters
from threefold.parallel.parameter import ShardedMatrix
from threefold.train.optim import Entry, UpdateRule
from threefold.train.optimizers import newton_schulz


def rule_of(parameters: dict[str, Tensor], **settings: Any) -> tuple[UpdateRule, dict[Tensor, Tensor]]:
    """The rule for whole parameters, and the mapping that it finds their gradients in."""
    config = OptimizerConfig.model_validate(settings)
    defaults = {key: value for key, value in hyper_parameters(config.name).items() if value is not None}
    config = OptimizerConfig.model_validate({**defaults, **settings})
    gradients: dict[Tensor, Tensor] = {}
    entries = [
        Entry(name, value, value, value, gradients, ShardedMatrix(value, ()), name in HIDDEN)  # type: ignore[arg-type]
        for name, value in parameters.items()
    ]
    return OPTIMIZERS.load(config.name)(entries, config), gradients


@torch.no_grad()
def train(parameters: dict[str, Tensor], **settings: Any) -> UpdateRule:
    rule, gradients = rule_of(parameters, **settings)
    for step in range(STEPS):
        gradients.update(zip(parameters.values(), weights(100 + step).values(), strict=True))
        rule.step(0.01 * (step + 1))
    return rule


def groups(parameters: dict[str, Tensor], decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    ("settings", "optimizer", "constants"),
    [
        ({"name": "adamw"}, torch.optim.AdamW, {"betas": (0.9, 0.95)}),
        ({"name": "adam", "betas": (0.8, 0.9)}, torch.optim.Adam, {"betas": (0.8, 0.9)}),
        ({"name": "sgd"}, torch.optim.SGD, {}),
        ({"name": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
        ({"name": "sgd", "momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
    ids=str,
)
def test_like_torch(settings: dict[str, Any], optimizer: type, constants: dict[str, Any]) -> None:
    ours, theirs = weights(0), weights(0)
    train(ours, **settings)
    train_torch(theirs, optimizer(groups(theirs, 0.1), **constants))
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-14, atol=1e-15)


def test_lion_by_its_formulas() -> None:
    ours, theirs = weights(0), weights(0)
    train(ours, name="lion", betas=(0.95, 0.98))
    momentum = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        for name, gradient in weights(100 + step).items():
            update = torch.sign(0.95 * momentum[name] + 0.05 * gradient)
            decay = 0.1 if theirs[name].dim() == 2 else 0.0
            theirs[name] = theirs[name] - 0.01 * (step + 1) * (update + decay * theirs[name])
            momentum[name] = 0.98 * momentum[name] + 0.02 * gradient
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("wide", [True, False], ids=["as if bf16 were fp64", "in bf16"])
@pytest.mark.parametrize(
    "constants",
    [{}, {"lr_scaling": "original", "nesterov": False, "momentum": 0.8, "newton_schulz_steps": 3}],
    ids=str,
)
def test_muon_like_torch(constants: dict[str, Any], wide: bool) -> None:
    """Torch iterates in bf16; with that taken out it gives the same weights, and with it nearly."""
    ours, theirs = weights(0), weights(0)
    rule = train(ours, name="muon", **constants)
    named = {"newton_schulz_steps": "ns_steps", "lr_scaling": "adjust_lr_fn"}
    muon = torch.optim.Muon(
        [theirs[name] for name in HIDDEN],
        weight_decay=0.1,
        **{"adjust_lr_fn": "match_rms_adamw", **{named.get(key, key): value for key, value in constants.items()}},
    )
    others = {name: value for name, value in theirs.items() if name not in HIDDEN}
    adamw = torch.optim.AdamW(groups(others, 0.1), betas=(0.9, 0.95))
    if wide:
        with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone()):
            train_torch(theirs, muon, adamw)
    else:
        train_torch(theirs, muon, adamw)
    for name in SHAPES:
        exact = wide or name not in HIDDEN
        tolerance = {"rtol": 1e-13, "atol": 1e-14} if exact else {"rtol": 0, "atol": 2e-3}
        torch.testing.assert_close(ours[name], theirs[name], **tolerance)
    for name in HIDDEN:
        entry = next(entry for entry in rule.entries if entry.name == name)
        torch.testing.assert_close(rule.state(entry)["momentum_buffer"], muon.state[theirs[name]]["momentum_buffer"])


def test_newton_schulz_brings_singular_values_near_one() -> None:
    matrices = torch.randn(3, 20, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = newton_schulz(matrices, 5)
    values = torch.linalg.svdvals(result)
    assert 0.6 < values.min() < values.max() < 1.3
    assert torch.equal(newton_schulz(matrices[1], 5), newton_schulz(matrices[1:2], 5)[0])
    assert not newton_schulz(torch.zeros(4, 4), 5).any()


def test_states_per_element_counts_the_states() -> None:
    for settings in ({"name": "adamw"}, {"name": "adam"}, {"name": "sgd"}, {"name": "lion"}, {"name": "muon"}):
        for momentum in ({}, {"momentum": 0.5}) if settings["name"] == "sgd" else ({},):
            rule, _ = rule_of(weights(0), **settings, **momentum)
            for entry in rule.entries:
                states = [state for state in rule.state(entry).values() if state.shape == entry.master.shape]
                hidden = entry.is_hidden
                assert len(states) == rule.states_per_element(rule.config, hidden), (settings, entry.name)
