"""From the settings of a model to a config.json."""

from collections.abc import Mapping
from typing import Any

from threefold.config import ModelConfig
from threefold.errors import UserError
from threefold.huggingface.families import FAMILIES, Family
from threefold.huggingface.rope import write_rope

_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What an imported config.json says of tokens, kept."""


def choose_family(model: ModelConfig, preferred: str | None) -> Family:
    """The family to write a model as: the one it came from where that still fits, else the first that does.

    Raises:
        UserError: none does.
    """
    ordered = sorted(FAMILIES.values(), key=lambda family: family.name != preferred)
    for family in ordered:
        if family.obstacle(model) is None:
            _check_rope(model)
            return family
    # The sentence names what stands against the kind that is nearest.
    experts = model.num_experts > 0
    near = [f for f in ordered if f.architecture == model.architecture and f.experts == experts]
    settings = sorted({obstacle for family in near if (obstacle := family.obstacle(model))})
    raise UserError(
        f"No family of Hugging Face that Threefold writes ({', '.join(FAMILIES)}) has a place for this model: "
        f"each lacks one of {'; '.join(settings)}."
    )


def _check_rope(model: ModelConfig) -> None:
    longest = model.max_position_embeddings
    if model.rope_scaling == "dynamic" and model.rope_original_positions != longest:
        raise UserError(
            f"model.rope_original_positions is {model.rope_original_positions}, and for rope_scaling dynamic a "
            f"config.json can only say {longest}, its max_position_embeddings; use linear, llama3 or yarn."
        )


def write_model(
    model: ModelConfig, family: Family, dtype: str, eod: int | None, imported: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json of a model.

    Args:
        model: resolved.
        family: from `choose_family`.
        dtype: of the files, as torch calls it.
        eod: the token that ends a document; None for none.
        imported: the config.json that the model came from; empty for none.
    """
    settings = _gpt(model) if family.architecture == "gpt" else _llama(model, family)
    tokens = {key: imported.get(key) for key in _KEPT}
    if tokens["eos_token_id"] is None:
        tokens["eos_token_id"] = eod
    return {
        "architectures": [family.head],
        "model_type": family.name,
        **settings,
        **tokens,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def left_out(model: ModelConfig, family: Family) -> tuple[str, ...]:
    """Settings of training, with their values, that a config.json of the family has no key for."""
    dropout = () if family.architecture == "gpt" else ("hidden_dropout",)
    settings = ("router_z_loss", "expert_capacity_factor", *dropout)
    return tuple(f"model.{name} {getattr(model, name):g}" for name in settings if getattr(model, name))


def _gpt(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "n_ctx": model.max_position_embeddings,
        "vocab_size": model.vocab_size,
        "activation_function": "gelu_new",
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.norm_eps,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _llama(model: ModelConfig, family: Family) -> dict[str, Any]:
    values = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "attention_dropout": model.attention_dropout,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_embeddings,
        **write_rope(model),
    }
    if family.name == "llama":
        values |= {"attention_bias": False, "mlp_bias": False}
    if family.name in ("qwen3", "qwen3_moe"):
        values |= {"attention_bias": False}
    if family.window != "none":
        values |= _window(model, family)
    return values | (_experts(model, family) if family.experts else {})


def _window(model: ModelConfig, family: Family) -> dict[str, Any]:
    values: dict[str, Any] = {"sliding_window": model.sliding_window or None}
    if family.name not in ("mistral", "mixtral"):
        values["use_sliding_window"] = model.sliding_window > 0
    if family.window == "tail":
        windows = [model.window(layer) for layer in range(model.num_layers)]
        values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
        values["max_window_layers"] = model.full_attention_layers if model.sliding_window else model.num_layers
    return values


def _experts(model: ModelConfig, family: Family) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_aux_loss,
        "output_router_logits": False,
    }
    if family.name == "mixtral":
        return values | {
            "num_local_experts": model.num_experts,
            "intermediate_size": model.expert_ffn_hidden_size,
            "router_jitter_noise": 0.0,
        }
    values |= {
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_ffn_hidden_size,
        "norm_topk_prob": model.normalize_expert_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not model.has_experts(layer)],
    }
    if family.shared:
        values["shared_expert_intermediate_size"] = model.shared_expert_ffn_hidden_size
    return values | ({"qkv_bias": model.qkv_bias} if family.name == "qwen2_moe" else {})
