"""From a config.json to the settings of a model."""

from collections.abc import Collection, Mapping
from typing import Any

from threefold.errors import UserError
from threefold.huggingface.families import COMMON_DEFAULTS, FAMILIES, Family
from threefold.huggingface.files import shortened
from threefold.huggingface.keys import Keys
from threefold.huggingface.rope import read_rope

_MOST_LAYERS, _MOST_EXPERTS = 100_000, 65_536
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_model(values: Mapping[str, Any], where: str, ignored: Collection[str] = ()) -> tuple[Family, dict[str, Any]]:
    """The family that a config.json names, and the settings of `model`.

    Args:
        values: what it holds.
        where: names it in sentences.
        ignored: keys that the user takes to be harmless.

    Raises:
        UserError: another family, or anything that Threefold cannot do.
    """
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"{where}: model_type is {shortened(repr(name))} and Threefold reads {', '.join(FAMILIES)}; "
            "give a model of one of these families."
        )
    family = FAMILIES[name]
    keys = Keys(values, COMMON_DEFAULTS | dict(family.defaults), where)
    keys.take("model_type")
    if keys.take("quantization_config"):
        raise keys.problem("quantization_config says that the weights are quantised", "take a copy that is not")
    settings = _gpt(keys) if family.architecture == "gpt" else _llama(keys, family)
    keys.finish(ignored)
    return family, {"architecture": family.architecture, **settings}


def _gpt(keys: Keys) -> dict[str, Any]:
    hidden = keys.whole("n_embd", least=1)
    keys.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    keys.require("scale_attn_weights", True)
    keys.require("scale_attn_by_inverse_layer_idx", False)
    keys.require("add_cross_attention", False)
    dropped = [float(keys.number(key, 0.1)) for key in ("embd_pdrop", "resid_pdrop")]
    if dropped[0] != dropped[1]:
        raise keys.problem(
            f"embd_pdrop is {dropped[0]} and resid_pdrop {dropped[1]}", "Threefold has one rate; make them equal"
        )
    return {
        "num_layers": keys.whole("n_layer", least=1, most=_MOST_LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": keys.whole("n_head", least=1),
        "ffn_hidden_size": keys.whole("n_inner", 4 * hidden, least=1),
        "vocab_size": keys.whole("vocab_size", least=1),
        "max_position_embeddings": keys.whole("n_positions", 1024, least=1),
        "hidden_dropout": dropped[0],
        "attention_dropout": float(keys.number("attn_pdrop", 0.1)),
        "position_embedding": "learned",
        "norm_eps": float(keys.number("layer_norm_epsilon", 1e-5)),
        "initializer_range": float(keys.number("initializer_range", 0.02)),
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
    }


def _llama(keys: Keys, family: Family) -> dict[str, Any]:
    keys.require("hidden_act", "silu", "swish")
    keys.require("mlp_bias", False)
    keys.require("attention_bias", False)  # transformers adds one to the output projection then, too
    hidden, heads = keys.whole("hidden_size", least=1), keys.whole("num_attention_heads", least=1)
    layers, positions = (
        keys.whole("num_hidden_layers", least=1, most=_MOST_LAYERS),
        keys.whole("max_position_embeddings", least=1),
    )
    if "head_dim" not in dict(family.defaults) and hidden % heads and not keys.take("head_dim"):
        raise keys.problem(f"hidden_size is {hidden}, no multiple of num_attention_heads {heads}", "give head_dim too")
    settings = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("num_key_value_heads", heads, least=1),
        "head_dim": keys.whole("head_dim", hidden // heads, least=1),
        "ffn_hidden_size": keys.whole("intermediate_size", least=1),
        "vocab_size": keys.whole("vocab_size", least=1),
        "max_position_embeddings": positions,
        "attention_dropout": float(keys.number("attention_dropout")),
        "norm_eps": float(keys.number("rms_norm_eps")),
        "qkv_bias": _qkv_bias(keys, family),
        "qk_norm": family.qk_norm,
        "initializer_range": float(keys.number("initializer_range")),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
    }
    settings |= read_rope(keys, positions) | _window(keys, family, layers)
    return settings | (_experts(keys, family, layers) if family.experts else {})


def _qkv_bias(keys: Keys, family: Family) -> bool:
    return keys.flag("qkv_bias", True) if family.name == "qwen2_moe" else family.qkv_bias[0]


def _window(keys: Keys, family: Family, layers: int) -> dict[str, Any]:
    """The sliding window, which all layers have or all but the first few."""
    if family.window == "none":
        return {}
    window = None if keys.take("sliding_window") is None else keys.whole("sliding_window")
    if family.name not in ("mistral", "mixtral") and not keys.flag("use_sliding_window"):
        window = None
    limit, kinds = keys.whole("max_window_layers"), keys.listed("layer_types", str)
    first_full = limit if family.window == "tail" else 0  # other families do not look at it
    if not window:
        if kinds and _SLIDING in kinds:
            raise keys.refuse(
                "layer_types", kinds, "sliding attention with use_sliding_window and sliding_window alone"
            )
        return {}
    if kinds is None and family.name == "qwen2_moe":
        # As transformers has it: every other layer among the first.
        kinds = [_SLIDING if layer % 2 == 0 and layer < first_full else _FULL for layer in range(layers)]
    if kinds is not None:
        first_full = next((layer for layer, kind in enumerate(kinds) if kind != _FULL), layers)
        ordered = kinds == [_FULL] * first_full + [_SLIDING] * (layers - first_full)
        if not ordered or (family.window == "all" and first_full):
            raise keys.refuse("layer_types", kinds, "full attention in the first layers and sliding in all others")
    if first_full >= layers:
        return {}
    return {"sliding_window": window, "full_attention_layers": first_full}


def _experts(keys: Keys, family: Family, layers: int) -> dict[str, Any]:
    keys.require("router_jitter_noise", 0.0, None)
    given = "num_local_experts" if keys.take("num_local_experts") else "num_experts"
    count = keys.whole(given, least=1, most=_MOST_EXPERTS)
    keys.take("num_experts")
    settings: dict[str, Any] = {
        "num_experts": count,
        "experts_per_token": keys.whole("num_experts_per_tok", least=1),
        "router_aux_loss": float(keys.number("router_aux_loss_coef")),
    }
    if family.name == "mixtral":
        return settings | {
            "normalize_expert_weights": True,
            "expert_ffn_hidden_size": keys.whole("intermediate_size", least=1),
        }
    settings["expert_ffn_hidden_size"] = keys.whole("moe_intermediate_size", least=1)
    settings["normalize_expert_weights"] = keys.flag("norm_topk_prob")
    if family.shared:
        settings["shared_expert_ffn_hidden_size"] = keys.whole("shared_expert_intermediate_size", least=1)
        settings["shared_expert_gate"] = True
    return settings | _sparse_layers(keys, layers)


def _sparse_layers(keys: Keys, layers: int) -> dict[str, Any]:
    """`moe_every` and `dense_layers` that give experts to the same layers."""
    step, dense = keys.whole("decoder_sparse_step", 1, least=1), set(keys.listed("mlp_only_layers", int) or [])
    wanted = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(wanted):
        raise keys.refuse("decoder_sparse_step", step, "experts in one layer at least for this family")
    first = wanted.index(True)
    for every in range(1, min(layers, first + 1) + 1):
        for skipped in (0, first):
            if wanted == [layer >= skipped and (layer + 1) % every == 0 for layer in range(layers)]:
                return {"moe_every": every, "dense_layers": skipped}
    raise keys.refuse("mlp_only_layers", sorted(dense), "experts in every so many-th layer after the first dense ones")
