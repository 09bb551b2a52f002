"""Rules of the `model` section, and of what the layout asks of it."""

from math import gcd

from threefold.config.config_error import nearest_divisor, nearest_multiple, problem
from threefold.config.model import FOR_EXPERTS, FOR_LLAMA, FOR_SCALED_ROPE
from threefold.config.schema import Config


def check_model(config: Config, vocab_size: int) -> None:
    """Check the sizes of the model.

    Raises:
        UserError: the first rule that is broken.
    """
    model = config.model
    _check_family(config)
    _check_heads(config)
    _check_rope(config)
    if model.num_experts:
        _check_experts(config)
    if model.full_attention_layers and not model.sliding_window:
        raise problem(config, "model.full_attention_layers", "model.sliding_window is 0, so all attend to all; use 0")
    if model.vocab_size < vocab_size:
        raise problem(
            config, "model.vocab_size", f"the tokenizer of the data has {vocab_size} tokens; use {vocab_size}"
        )


def check_division(config: Config) -> None:
    """Check that the tensor and the expert axis divide the model.

    Raises:
        UserError: the first rule that is broken.
    """
    model, parallel = config.model, config.parallel
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(model, key)
        if heads % parallel.tp:
            rule = f"must divide model.{key} {heads}; use {nearest_divisor(parallel.tp, model.num_key_value_heads)}"
            raise problem(config, "parallel.tp", rule)
    for key in ("ffn_hidden_size", "expert_ffn_hidden_size", "shared_expert_ffn_hidden_size"):
        width = getattr(model, key)
        if width % parallel.tp:
            rule = f"must be a multiple of parallel.tp {parallel.tp}; use {nearest_multiple(width, parallel.tp)}"
            raise problem(config, f"model.{key}", rule)
    if parallel.tp > model.vocab_size:
        raise problem(config, "parallel.tp", f"model.vocab_size is {model.vocab_size}; use at most {model.vocab_size}")
    _check_expert_axis(config)


def _check_expert_axis(config: Config) -> None:
    ep, dp, experts = config.parallel.ep, config.parallel.dp, config.model.num_experts
    if ep == 1:
        return
    if experts == 0:
        raise problem(config, "parallel.ep", "model.num_experts is 0, so there are none to share; use 1")
    works = nearest_divisor(ep, gcd(dp, experts))
    if dp % ep:
        raise problem(config, "parallel.ep", f"must divide parallel.dp {dp}; use {works}")
    if experts % ep:
        raise problem(config, "parallel.ep", f"must divide model.num_experts {experts}; use {works}")


def _check_family(config: Config) -> None:
    """A setting that the model would not look at is a mistake."""
    model = config.model
    for name in model.meaningless():
        if getattr(model, name) != model.at_rest(name):
            raise problem(config, f"model.{name}", _WHERE_IT_MEANS[_group(name)])
    if model.architecture == "llama" and model.position_embedding != "rope":
        raise problem(config, "model.position_embedding", "model.architecture llama has rotary positions; use rope")


_WHERE_IT_MEANS = {
    FOR_LLAMA: "model.architecture is gpt, which has no such thing; use architecture llama or leave it out",
    FOR_EXPERTS: "model.num_experts is 0; use num_experts 8 or leave it out",
    FOR_SCALED_ROPE: "model.rope_scaling is none; use rope_scaling linear or leave it out",
}


_RAMPS = (("rope_low_frequency_factor", "rope_high_frequency_factor"), ("rope_beta_slow", "rope_beta_fast"))
"""Where frequencies begin to be divided less, and where they stay: turns in the original positions."""


def _group(name: str) -> tuple[str, ...]:
    return next(group for group in _WHERE_IT_MEANS if name in group)


def _check_heads(config: Config) -> None:
    model = config.model
    heads, key_value = model.num_attention_heads, model.num_key_value_heads
    if model.head_dim is None or (model.architecture == "gpt" and model.hidden_size % heads):
        rule = f"must divide model.hidden_size {model.hidden_size}; use {nearest_divisor(heads, model.hidden_size)}"
        raise problem(config, "model.num_attention_heads", rule)
    if heads % key_value:
        rule = f"must divide model.num_attention_heads {heads}; use {nearest_divisor(key_value, heads)}"
        raise problem(config, "model.num_key_value_heads", rule)


def _check_rope(config: Config) -> None:
    model = config.model
    width = model.head_dim
    if model.position_embedding == "rope" and width % 2:
        if model.architecture == "llama":
            raise problem(config, "model.head_dim", f"must be even for rotary positions; use {width + 1}")
        rule = f"the width of a head, model.hidden_size / model.num_attention_heads = {width}, must be even for it"
        nearest = (width + 1) * model.num_attention_heads
        raise problem(config, "model.position_embedding", f"{rule}; use model.hidden_size {nearest}, or learned")
    if model.rope_scaling != "none" and model.position_embedding != "rope":
        raise problem(config, "model.rope_scaling", "model.position_embedding is learned; use none, or rope")
    if model.rope_scaling == "dynamic" and width == 2:
        raise problem(config, "model.rope_scaling", "heads of width 2 turn alike whatever the base; use linear")
    if model.rope_scaling == "yarn" and model.rope_theta <= 1:
        raise problem(config, "model.rope_theta", "must be above 1 for model.rope_scaling yarn; use 10000")
    for low, high in _RAMPS:
        end = getattr(model, high)
        if getattr(model, low) >= end:
            raise problem(config, f"model.{low}", f"must be below model.{high} {end:g}; use {end / 4:g}")


def _check_experts(config: Config) -> None:
    model = config.model
    if model.experts_per_token > model.num_experts:
        rule = f"model.num_experts is {model.num_experts}; use at most {model.num_experts}"
        raise problem(config, "model.experts_per_token", rule)
    if not any(model.has_experts(layer) for layer in range(model.num_layers)):
        key = "moe_every" if model.moe_every > model.num_layers else "dense_layers"
        nearest = model.num_layers if key == "moe_every" else 0
        rule = f"none of the {model.num_layers} layers has experts then; use {nearest}"
        raise problem(config, f"model.{key}", rule)
    if model.shared_expert_gate and not model.shared_expert_ffn_hidden_size:
        rule = "model.shared_expert_ffn_hidden_size is 0, so there is nothing to weigh; use false"
        raise problem(config, "model.shared_expert_gate", rule)
