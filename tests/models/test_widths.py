"""µP beside the tables of its paper, with roles from the shapes of two widths, and beside the package `mup`."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.parity import MOE_SIZES, OSS_SIZES, Case
from threefold.config import Config, OptimizerConfig, resolve
from threefold.config.loading import config_of
from threefold.config.optimizer import hyper_parameters
from threefold.errors import UserError
from threefold.huggingface.files import choose_type
from threefold.models.family import make_model, model_plan
from threefold.models.layers.attention import CausalAttention
from threefold.models.sharding import Normal
from threefold.models.widths import rate_factor, role_of
from threefold.parallel.parameter import ShardedMatrix
from threefold.train.optim import Entry
from threefold.train.optimizers import update_rule

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"architecture": "llama", "qk_norm": True, "qkv_bias": True, "attention_gate": True, "tie": False},
    "plain": {"architecture": "llama", "tie": False},
    "mixture": {**dict(MOE_SIZES), "tie": False},
    "oss": {**dict(OSS_SIZES), "attention_sinks": True, "tie": False},
}
FACTOR = 4
RATES = {  # of table 8 of arXiv 2203.03466, without the multiplier (table 3) for weights that read the width in a block
    "adamw": {"hidden": 1 / FACTOR, "readout": 1 / FACTOR, "input": 1.0, "fixed": 1.0},
    "sgd": {"hidden": 1.0, "readout": 1 / FACTOR, "input": FACTOR, "fixed": 1.0},
    "lion": {"hidden": 1 / FACTOR, "readout": 1 / FACTOR, "input": 1.0, "fixed": 1.0},
}


@cache
def config_at(name: str, wider: int, base: int = 0) -> Config:
    """Of a model whose widths are `wider` times the base's: heads, features and experts' features."""
    given = dict(MODELS[name])
    widths = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
    widths |= {key: given[key] for key in ("expert_ffn_hidden_size", "shared_expert_ffn_hidden_size") if key in given}
    if name != "gpt":
        widths |= {"num_key_value_heads": 2}
        given["head_dim"] = 8
    tie = given.pop("tie", True)
    given |= {key: wider * value for key, value in widths.items()} | {"num_layers": 2, "tie_embeddings": tie}
    model = {**given, "vocab_size": 67, "width_base": base}
    return resolve(config_of({"data": {"path": "unused", "sequence_length": 8}, "model": model}), 67)


def model_at(name: str, wider: int, base: int = 0) -> nn.Module:
    with torch.device("meta"):
        return make_model(config_at(name, wider, base).model)


def roles(name: str) -> dict[str, str]:
    """Of each parameter, from the dims in which two widths of the model differ."""
    found = {}
    wide = dict(model_at(name, FACTOR).named_parameters())
    for parameter, base in model_at(name, 1).named_parameters():
        grows = [one != other for one, other in zip(base.shape, wide[parameter].shape, strict=True)]
        matrix = parameter.startswith("blocks.") and not parameter.endswith("bias")
        reads = matrix and grows == [False, True]
        found[parameter] = "hidden" if sum(grows) == 2 else "readout" if reads else "input" if any(grows) else "fixed"
    return found


@pytest.mark.parametrize("name", MODELS)
def test_roles_are_those_of_the_shapes(name: str) -> None:
    """But for a number for each head (sinks) and what no width reads, whose rate under SGD is that of the base."""
    for parameter, role in roles(name).items():
        if parameter.endswith("sinks"):
            continue
        assert role_of(parameter) == role, parameter


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_of_the_paper(name: str) -> None:
    """Hidden weights have a variance of 1 / fan-in, what reads the width 1 / fan-in², all others a constant one."""
    one, wide = (model_plan(config_at(name, wider, 32).model, 8) for wider in (1, FACTOR))
    expected = {"hidden": FACTOR**-0.5, "readout": 1 / FACTOR, "input": 1.0, "fixed": 1.0}
    for parameter, role in roles(name).items():
        before, now = one.initial(parameter), wide.initial(parameter)
        assert type(before) is type(now)
        if isinstance(before, Normal) and isinstance(now, Normal):
            assert now.std == pytest.approx(before.std * expected[role], rel=1e-12)
        else:
            assert before == now


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_logits_of_the_paper(name: str) -> None:
    """Scores are divided by the heads' width, and logits by that of the model."""
    for base, scale, logits in ((32, 1 / 8, 1 / FACTOR), (128, 1 / 8, 1.0), (0, 8**-0.5, 1.0)):
        model = model_at(name, FACTOR, base)
        cores = [module for module in model.modules() if isinstance(module, CausalAttention)]
        assert [core.scale or 8**-0.5 for core in cores] == [scale] * 2
        assert model.get_submodule("head").scale == logits
    heads = [make_model(config_at(name, 1, base).model).head for base in (0, 8)]
    heads[1].load_state_dict(heads[0].state_dict())
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(heads[1](x), heads[0](x) / 4)


def settings(optimizer: str) -> dict[str, Any]:
    return {**hyper_parameters(optimizer), "name": optimizer}


@pytest.mark.parametrize("optimizer", RATES)
def test_rates_of_the_paper(optimizer: str) -> None:
    config = OptimizerConfig.model_validate(settings(optimizer))
    found = {role: rate_factor(config, role, float(FACTOR)) for role in ("hidden", "readout", "input", "fixed")}
    assert found == RATES[optimizer]


@pytest.mark.parametrize("scaling", ["match_rms_adamw", "original"])
def test_updates_of_muon_have_the_spectral_norm_of_the_paper_s_condition(scaling: str) -> None:
    """That of √(rows / columns), times a number that no width changes (arXiv 2310.17813, condition 1)."""
    config = OptimizerConfig.model_validate({**settings("muon"), "lr_scaling": scaling})
    for role, shape in (("hidden", (1, 1)), ("hidden", (4, 1)), ("hidden", (1, 4)), ("readout", (0, 1))):
        moved = []
        for width in (1, FACTOR, 16):
            rows, columns = 12 * width * shape[0] or 4, 12 * width * shape[1]
            scale = max(1, rows / columns) ** 0.5 if scaling == "original" else max(rows, columns) ** 0.5
            moved.append(scale * rate_factor(config, role, float(width)) / (rows / columns) ** 0.5)
        assert moved == pytest.approx([moved[0]] * 3)


def rule_of(name: str, optimizer: str) -> dict[str, tuple[float, float]]:
    """Return the factor on the rate, and the weight decay, of each parameter of the wide model."""
    config = config_at(name, FACTOR, 32)
    plan, chosen = model_plan(config.model, 8), OptimizerConfig.model_validate(settings(optimizer))
    entries = []
    for parameter, value in make_model(config.model).named_parameters():
        whole, hidden = ShardedMatrix(value, ()), plan.is_hidden_matrix(parameter, value.dim())
        entry = Entry(parameter, value, value, value, {}, whole, hidden)  # type: ignore[arg-type]
        entries.append(Entry(**{**vars(entry), "role": role_of(parameter), "width": plan.width}))
    rule = update_rule(chosen, plan.width)(entries, chosen)
    return {entry.name: (rule.lr_scale(entry), rule.weight_decay(entry)) for entry in entries}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_like_mup(name: str, optimizer: str) -> None:
    """Rates, decays and initial values of the wide model, and its logits by `MuReadout`."""
    mup: Any = pytest.importorskip("mup")
    config = config_at(name, FACTOR, 32)
    model = make_model(config.model)
    shapes = model_at(name, 1), model_at(name, 2)
    mup.set_base_shapes(model, shapes[0], delta=shapes[1], rescale_params=False, do_assert=False)
    make = mup.MuAdamW if optimizer == "adamw" else mup.MuSGD
    theirs = make(model.parameters(), lr=1.0, weight_decay=0.1)
    groups = {id(each): group for group in theirs.param_groups for each in group["params"]}
    for parameter, (scale, decay) in rule_of(name, optimizer).items():
        group = groups[id(model.get_parameter(parameter))]
        assert scale == pytest.approx(group["lr"]), parameter
        assert decay in (pytest.approx(group["weight_decay"]), 0.0), parameter
        initial, base = (model_plan(config_at(name, wider, 32).model, 8).initial(parameter) for wider in (FACTOR, 1))
        if isinstance(initial, Normal) and isinstance(base, Normal):
            weight = model.get_parameter(parameter)
            torch.manual_seed(0)
            mup.normal_(weight, std=base.std)
            drawn = weight.detach().clone()
            torch.manual_seed(0)
            torch.testing.assert_close(drawn, torch.nn.init.normal_(weight, std=initial.std))
    readout = mup.MuReadout(128, 67, bias=False, readout_zero_init=True)
    readout.weight = model.get_submodule("head").output.weight
    x = torch.randn(2, 3, 128)
    head = model.get_submodule("head")
    torch.testing.assert_close(head(x), readout(head.norm(x)))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"optimizer": {"name": "torch.optim:RMSprop"}}, r"width_base is 8 but the optimizer torch\.optim:RMSprop has"),
        ({"model": {"architecture": "deepseek"}}, r"architecture is deepseek, which has no such thing"),
        ({"model": {"architecture": "llama", "mtp_layers": 1}}, r"mtp_layers is 1, for which µP has no rules"),
    ],
    ids=str,
)
def test_what_is_refused(sections: dict[str, Any], sentence: str) -> None:
    model = {"width_base": 8, "vocab_size": 67, **sections.pop("model", {})}
    with pytest.raises(UserError, match=sentence):
        resolve(config_of({"data": {"path": "unused"}, "model": model, **sections}), 67)


@pytest.mark.parametrize("name", ["gpt", "plain"])
def test_no_type_of_hugging_face_has_it(name: str) -> None:
    assert choose_type(config_at(name, 1).model, None)
    with pytest.raises(UserError, match=r"has a place for this model: each lacks .*model\.width_base 32"):
        choose_type(config_at(name, 1, 32).model, None)


def test_the_base_trains_as_one_with_other_scores() -> None:
    """At the base's width, initial values, rates and logits are those without µP."""
    model = Case(model=(("width_base", 36),)).config.model
    assert model.width == 1.0
    assert model_plan(model, 8).width == 1.0
