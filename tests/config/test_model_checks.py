"""The rules of the model's settings, each with its sentence."""

from math import log, sqrt
from typing import Any

import pytest

from threefold.config import Config, resolve
from threefold.config.model import FOR_SCALED_ROPE, ModelConfig
from threefold.errors import UserError
from threefold.models.gpt import GPTConfig
from threefold.models.layers.mixture_config import FOR_EXPERTS
from threefold.models.llama import LlamaConfig

FOR_LLAMA = tuple(name for name in LlamaConfig.model_fields if name not in {*GPTConfig.model_fields, *FOR_EXPERTS})
FOR_WINDOW = ("sliding_rope_theta", "sliding_rope_scaling")
MEANINGLESS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "qkv_bias": True,
    "qk_norm": True,
    "sliding_window": 64,
    "full_attention_layers": 1,
    "attention_softcap": 50.0,
    "attention_sinks": True,
    "attention_pattern": "1 sliding : 1 full",
    "sliding_rope_theta": 500.0,
    "sliding_rope_scaling": False,
    "rotary_share": 0.5,
    "qk_norm_over": "width",
    "attention_scale": 0.3,
    "attention_gate": True,
    "proj_bias": True,
    "norm_position": "after",
    "norm_offset": True,
    "gate_activation": "gelu",
    "embedding_scale": 2.0,
    "logit_softcap": 30.0,
    "num_experts": 8,
    "experts_per_token": 1,
    "expert_ffn_hidden_size": 96,
    "shared_expert_ffn_hidden_size": 96,
    "shared_expert_gate": True,
    "normalize_expert_weights": False,
    "expert_capacity_factor": 1.5,
    "moe_every": 2,
    "dense_layers": 1,
    "router_aux_loss": 0.01,
    "router_z_loss": 0.001,
    "router": "sigmoid",
    "router_bias_rate": 0.001,
    "router_groups": 4,
    "router_groups_chosen": 2,
    "routed_scale": 2.5,
    "router_sequence_loss": 0.0001,
    "router_bias": True,
    "expert_bias": True,
    "expert_gate_limit": 7.0,
    "mtp_layers": 2,
    "mtp_loss": 0.1,
    "rope_factor": 2.0,
    "rope_original_positions": 64,
    "rope_low_frequency_factor": 2.0,
    "rope_high_frequency_factor": 8.0,
    "rope_beta_fast": 16.0,
    "rope_beta_slow": 2.0,
    "rope_attention_factor": 1.2,
    "rope_truncate": False,
    "rope_short_factors": [1.0],
    "rope_long_factors": [2.0],
}
"""A value of each setting that means nothing in some family."""


def resolved(model: dict[str, Any], parallel: dict[str, int] | None = None, vocab_size: int = 1000) -> Config:
    given = {"data": {"path": "x"}, "model": model, "parallel": parallel or {}}
    return resolve(Config.model_validate(given), vocab_size)


def message(model: dict[str, Any], parallel: dict[str, int] | None = None, vocab_size: int = 1000) -> str:
    with pytest.raises(UserError) as caught:
        resolved(model, parallel, vocab_size)
    return str(caught.value)


def llama(**settings: Any) -> dict[str, Any]:
    return {"architecture": "llama", **settings}


def mixture(**settings: Any) -> dict[str, Any]:
    return llama(num_experts=8, **settings)


@pytest.mark.parametrize(
    ("base", "names", "reason"),
    [
        (llama(), FOR_WINDOW, "model.sliding_window is 0; use sliding_window 1024 or leave it out"),
        (llama(), ("qk_norm_over",), "model.qk_norm is false; use qk_norm true or leave it out"),
        ({}, tuple(name for name in FOR_LLAMA if name not in (*FOR_WINDOW, "qk_norm_over", "mtp_loss")), "model.architecture is gpt, which has no such thing; use architecture llama or leave it out"),
        (llama(), ("mtp_loss",), "model.mtp_layers is 0; use mtp_layers 1 or leave it out"),
        (llama(), FOR_EXPERTS, "model.num_experts is 0; use num_experts 8 or leave it out"),
        (llama(), FOR_SCALED_ROPE, "model.rope_scaling is none; use rope_scaling linear or leave it out"),
        ({"position_embedding": "rope"}, FOR_SCALED_ROPE, "model.rope_scaling is none; use rope_scaling linear or leave it out"),
    ],
    ids=["no-window", "no-norm", "gpt", "one-token", "dense", "unscaled", "gpt-unscaled"],
)  # fmt: skip
def test_settings_that_would_mean_nothing(base: dict[str, Any], names: tuple[str, ...], reason: str) -> None:
    for name in names:
        value = MEANINGLESS[name]
        shown = str(value).lower() if isinstance(value, bool) else value
        assert message({**base, name: value}) == f"model.{name} is {shown} but {reason}."


def test_settings_that_would_mean_nothing_but_are_as_they_were() -> None:
    """So that a resolved config, which has them all, may be read again."""
    rest = {"num_key_value_heads": 8, "head_dim": 32, "qkv_bias": False, "experts_per_token": 2, "rope_factor": 1.0}
    assert resolved(rest) == resolved({})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (llama(position_embedding="learned"), "model.position_embedding is learned but model.architecture llama has rotary positions; use rope."),
        (llama(num_attention_heads=7), "model.num_attention_heads is 7 but must divide model.hidden_size 256; use 8."),
        (llama(num_key_value_heads=3), "model.num_key_value_heads is 3 but must divide model.num_attention_heads 8; use 2."),
        (llama(num_key_value_heads=16), "model.num_key_value_heads is 16 but must divide model.num_attention_heads 8; use 8."),
        (llama(head_dim=5), "model.head_dim is 5 but must be even for rotary positions; use 6."),
        ({"rope_scaling": "linear"}, "model.rope_scaling is linear but model.position_embedding is learned; use none, or rope."),
        (llama(rope_scaling="llama3", rope_low_frequency_factor=4.0), "model.rope_low_frequency_factor is 4.0 but must be below model.rope_high_frequency_factor 4; use 1."),
        (llama(rope_scaling="yarn", rope_beta_fast=1.0), "model.rope_beta_slow is 1.0 but must be below model.rope_beta_fast 1; use 0.25."),
        (llama(rope_scaling="dynamic", head_dim=2), "model.rope_scaling is dynamic but heads of width 2 turn alike whatever the base; use linear."),
        (llama(rope_scaling="longrope", rope_short_factors=[1.0] * 3, rope_long_factors=[2.0] * 32, head_dim=64), "model.rope_short_factors is [1.0, 1.0, 1.0] but has 3 factors and 64 features of a head rotate; give 32, such as [1.0, 1.0]."),
        (llama(rope_scaling="yarn", rope_long_factors=[2.0]), "model.rope_long_factors is [2.0] but model.rope_scaling is yarn; use longrope or leave it out."),
        (llama(rope_scaling="yarn", rope_theta=1.0), "model.rope_theta is 1.0 but must be above 1 for model.rope_scaling yarn; use 10000."),
        (llama(full_attention_layers=2), "model.full_attention_layers is 2 but model.sliding_window is 0, so every layer attends to all positions; use 0."),
        (llama(num_layers=3, attention_pattern=["full", "sliding"], sliding_window=8), "model.attention_pattern is ['full', 'sliding'] but has 2 layers and model.num_layers is 3; give 3 of them or a period like '1 sliding : 1 full'."),
        (llama(attention_pattern="5 sliding : 1 global", sliding_window=8), "model.attention_pattern is 5 sliding : 1 global but has 'global' for a layer, which is full or sliding; use '1 sliding : 1 full'."),
        (llama(attention_pattern="5 sliding, 1 full", sliding_window=8), "model.attention_pattern is 5 sliding, 1 full but has '5 sliding, 1 full' for a layer, which is full or sliding; use '1 sliding : 1 full'."),
        (llama(attention_pattern="5 sliding : 1 full"), "model.attention_pattern is 5 sliding : 1 full but model.sliding_window is 0; use sliding_window 1024 with it."),
        (llama(attention_pattern="full", sliding_window=8), "model.attention_pattern is full but has no sliding layer and model.sliding_window is 8; use '1 sliding : 1 full', or sliding_window 0."),
        (llama(num_layers=3, attention_pattern="3 full : 1 sliding", sliding_window=8), "model.attention_pattern is 3 full : 1 sliding but has no sliding layer and model.sliding_window is 8; use '1 sliding : 1 full', or sliding_window 0."),
        (llama(attention_pattern="sliding", sliding_window=8, full_attention_layers=2), "model.attention_pattern is sliding but model.full_attention_layers is 2, which says the same otherwise; use full_attention_layers 0 with it."),
        (llama(rotary_share=0.1), "model.rotary_share is 0.1 but rotates 3 of the 32 features of a head, which must be even; use 0.125."),
        (llama(rotary_share=0.33, head_dim=96), "model.rotary_share is 0.33 but rotates 31 of the 96 features of a head, which must be even; use 0.333334."),
        (llama(rotary_share=0.33, head_dim=6), "model.rotary_share is 0.33 but rotates 1 of the 6 features of a head, which must be even; use 0.333334."),
        (llama(attention_pattern=[], sliding_window=8), "model.attention_pattern is [] but has 0 layers and model.num_layers is 8; give 8 of them or a period like '1 sliding : 1 full'."),
        (mixture(expert_gate_limit=7.0, gate_activation="gelu"), "model.gate_activation is gelu but all gates are of experts, and model.expert_gate_limit is 7; use expert_gate_limit 0 or leave it out."),
        (llama(sliding_window=8, sliding_rope_scaling=False), "model.sliding_rope_scaling is false but model.rope_scaling is none; use rope_scaling linear or leave it out."),
        (mixture(experts_per_token=9), "model.experts_per_token is 9 but model.num_experts is 8; use at most 8."),
        (mixture(moe_every=9), "model.moe_every is 9 but none of the 8 layers has experts then; use 8."),
        (mixture(dense_layers=8), "model.dense_layers is 8 but none of the 8 layers has experts then; use 0."),
        (mixture(dense_layers=6, moe_every=3), "model.dense_layers is 6 but none of the 8 layers has experts then; use 0."),
        (mixture(shared_expert_gate=True), "model.shared_expert_gate is true but model.shared_expert_ffn_hidden_size is 0, so there is nothing to weigh; use false."),
        (mixture(router="softmax_chosen", normalize_expert_weights=False), "model.normalize_expert_weights is false but the weights of model.router softmax_chosen add up to 1; use true."),
        (mixture(router_bias_rate=0.001, expert_capacity_factor=1.0), "model.expert_capacity_factor is 1.0 but model.router_bias_rate 0.001 balances the experts without dropping tokens; use 0."),
        (mixture(router="sigmoid", router_groups=8), "model.router_groups is 8 but must divide model.num_experts 8 into groups of at least two; use 4."),
        (mixture(router_groups=1), "model.router_groups is 1 but one group of all experts is no choice among groups; use 0."),
        (llama(num_experts=3, router_groups=2), "model.router_groups is 2 but must divide model.num_experts 3 into groups of at least two; use 0."),
        (mixture(router_groups=3), "model.router_groups is 3 but must divide model.num_experts 8 into groups of at least two; use 2."),
        (mixture(router_groups=4, router_groups_chosen=5), "model.router_groups_chosen is 5 but model.router_groups is 4; use at most 4."),
        (mixture(router_groups=4, experts_per_token=3), "model.router_groups_chosen is 1 but its groups have fewer experts than model.experts_per_token 3; use 2."),
        (mixture(router_groups_chosen=2), "model.router_groups_chosen is 2 but model.router_groups is 0; use router_groups 4 or leave it out."),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(model: dict[str, Any], expected: str) -> None:
    assert message(model) == expected


@pytest.mark.parametrize("head_dim", [6, 10, 34, 96, 112, 250])
def test_the_nearest_share_of_a_head_works(head_dim: int) -> None:
    for odd in range(1, head_dim, 2):
        proposed = message(llama(head_dim=head_dim, rotary_share=(odd + 0.01) / head_dim)).split()[-1]
        resolved(llama(head_dim=head_dim, rotary_share=float(proposed.removesuffix("."))))


def test_gates_outside_of_limited_experts_have_their_activation() -> None:
    limited = mixture(expert_gate_limit=7.0, gate_activation="gelu")
    assert resolved(limited | {"dense_layers": 1}).model.gate_activation == "gelu"
    assert resolved(limited | {"shared_expert_ffn_hidden_size": 32}).model.gate_activation == "gelu"


@pytest.mark.parametrize(
    ("model", "parallel", "expected"),
    [
        (llama(num_attention_heads=12, num_key_value_heads=6, hidden_size=288), {"tp": 4}, "parallel.tp is 4 but must divide model.num_key_value_heads 6 or be a multiple of it; use 3."),
        (llama(num_attention_heads=12, num_key_value_heads=3, hidden_size=288), {"tp": 2}, "parallel.tp is 2 but must divide model.num_key_value_heads 3 or be a multiple of it; use 1."),
        (llama(num_attention_heads=8, num_key_value_heads=2), {"tp": 5}, "parallel.tp is 5 but must divide model.num_attention_heads 8; use 4."),
        (mixture(expert_ffn_hidden_size=9), {"tp": 2}, "model.expert_ffn_hidden_size is 9 but must be a multiple of parallel.tp 2; use 8."),
        (mixture(shared_expert_ffn_hidden_size=9), {"tp": 2}, "model.shared_expert_ffn_hidden_size is 9 but must be a multiple of parallel.tp 2; use 8."),
        (llama(), {"ep": 2, "dp": 2}, "parallel.ep is 2 but model.num_experts is 0, so there are none to share; use 1."),
        (mixture(), {"ep": 3, "dp": 4}, "parallel.ep is 3 but must divide parallel.dp 4; use 2."),
        (llama(num_experts=6), {"ep": 4, "dp": 4}, "parallel.ep is 4 but must divide model.num_experts 6; use 2."),
    ],
)  # fmt: skip
def test_layouts_that_do_not_divide_the_model(model: dict[str, Any], parallel: dict[str, int], expected: str) -> None:
    assert message(model, parallel) == expected
    axis, nearest = ("ep" if "ep" in parallel else "tp"), int(expected.rstrip(".").split()[-1])
    mended = ({**model, "expert_ffn_hidden_size": 8, "shared_expert_ffn_hidden_size": 8}, parallel)
    resolved(*(mended if "_ffn_" in expected else (model, {**parallel, axis: nearest})))


@pytest.mark.parametrize(("key_value", "tp"), [(2, 4), (1, 4), (1, 8), (4, 8), (2, 8)])
def test_key_value_heads_may_be_on_several_ranks(key_value: int, tp: int) -> None:
    assert resolved(llama(num_key_value_heads=key_value), {"tp": tp}).parallel.tp == tp


def test_more_tensor_ranks_than_tokens() -> None:
    heads = {"num_attention_heads": 64}
    expected = "parallel.tp is 64 but model.vocab_size is 5; use at most 5."
    assert message(heads, {"tp": 64}, vocab_size=5) == expected


def test_what_a_family_allows_beside_the_usual() -> None:
    """Heads that do not divide the width, if theirs is given; few heads of keys; experts in some layers alone."""
    model = resolved(llama(num_attention_heads=7, head_dim=10, num_key_value_heads=1)).model
    assert (model.num_key_value_heads, model.head_dim) == (1, 10)
    model = resolved(mixture(moe_every=2, dense_layers=3)).model
    assert [layer for layer in range(8) if model.has_experts(layer)] == [3, 5, 7]


def test_layers_attend_by_a_list_or_a_period() -> None:
    """Of which a resolved config keeps what was given."""
    for pattern, layers in (
        ("5 sliding : 1 full", [8, 8, 8, 8, 8, 0, 8, 8]),
        ("full : 2 sliding", [0, 8, 8, 0, 8, 8, 0, 8]),
        (["full", *["sliding"] * 7], [0, *[8] * 7]),
    ):
        config = resolved(llama(attention_pattern=pattern, sliding_window=8, sliding_rope_theta=5.0))
        assert [config.model.window(layer) for layer in range(8)] == layers
        assert [config.model.rope_base(layer) for layer in range(8)] == [5.0 if window else 1e4 for window in layers]
        assert Config.model_validate(config.sections()).model.attention_pattern == pattern


def test_new_settings_are_not_in_a_resolved_config_that_lacks_them() -> None:
    plain = resolved(llama(sliding_window=8)).sections()["model"]
    assert not plain.keys() & LlamaConfig.unlisted
    given = resolved(llama(sliding_window=8, norm_position="both", attention_scale=0.2)).sections()["model"]
    assert given.keys() & LlamaConfig.unlisted == {"norm_position", "attention_scale"}


def test_the_factor_of_queries_and_keys_is_that_of_the_longer_context() -> None:
    given = llama(rope_scaling="longrope", rope_factor=32.0, rope_original_positions=4096, head_dim=4)
    given |= {"rope_short_factors": [1, 1.1], "rope_long_factors": [2, 3.5]}
    found = resolved(given).model
    assert found.rope_attention_factor == pytest.approx(sqrt(1 + log(32) / log(4096)))  # Phi-3.5's 1.1902
    assert ModelConfig.model_validate(found.settings()).settings() == found.settings()
    assert found.settings()["rope_long_factors"] == [2.0, 3.5]
