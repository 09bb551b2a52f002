"""Gemma 2, and the text model of Gemma 3, in Hugging Face's format."""

from typing import Any, Final

from threefold.huggingface import mapping as hf
from threefold.huggingface.llama import DEFAULTS, NAMES, LlamaType
from threefold.models.llama import LlamaConfig

_CAPS: Final = {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"}
_NAMES: Final = NAMES.with_others(
    {
        "attn_out_norm.weight": "post_attention_layernorm.weight",
        "mlp_norm.weight": "pre_feedforward_layernorm.weight",
        "mlp_out_norm.weight": "post_feedforward_layernorm.weight",
    }
)


class GemmaType(LlamaType):
    """Gemma 2 or 3, whose scale of scores is a whole number to the power of -0.5."""

    def _read_block(self, given: hf.ConfigJson) -> dict[str, Any]:
        given.require("hidden_activation", "gelu_pytorch_tanh")
        given.require("hidden_act", "gelu_pytorch_tanh", None)  # ignored by transformers
        given.require("attention_bias", False)
        given.require("use_bidirectional_attention", False, None)
        given.take("cache_implementation")
        caps = {ours: float(given.number(theirs, 0.0)) for theirs, ours in _CAPS.items()}
        scalar = given.number("query_pre_attn_scalar")
        if scalar <= 0:
            raise given.problem(f"query_pre_attn_scalar is {scalar} but must be above 0")
        return {**caps, "attention_scale": scalar**-0.5}

    def write(self, model: LlamaConfig) -> dict[str, Any]:
        written = super().write(model)
        del written["hidden_act"]
        caps = {theirs: getattr(model, ours) or None for theirs, ours in _CAPS.items()}
        return {
            **written,
            **caps,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "query_pre_attn_scalar": round(model.attention_scale**-2),
        }

    def obstacle(self, model: LlamaConfig) -> str | None:
        scalar = round(model.attention_scale**-2)
        if not scalar or model.attention_scale != scalar**-0.5:
            return f"model.attention_scale {model.attention_scale:g}"
        if model.embedding_scale != model.hidden_size**0.5:
            return f"model.embedding_scale {model.embedding_scale:g}"
        return super().obstacle(model)


def _type(
    name: str, head: str, defaults: dict[str, Any], further: tuple[str, ...] = (), **differences: Any
) -> GemmaType:
    fixed = {"norm_position": "both", "norm_offset": True, "gate_activation": "gelu_tanh"}
    fixed["sliding_rope_scaling"] = not differences.get("by_kind", False)
    free = frozenset(("attention_pattern", "attention_scale", "embedding_scale", *_CAPS.values(), *further))
    usual = DEFAULTS | {"query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 4096}
    usual |= {"hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4, "tie_word_embeddings": True}
    given: dict[str, Any] = {"defaults": usual | defaults, "window": "pattern", "fixed": fixed, "free": free}
    return GemmaType(name, "gemma", head, _NAMES, **given | differences)


TYPES: Final = (
    _type(
        "gemma2",
        "Gemma2ForCausalLM",
        {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        full_every=2,
    ),
    _type(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"max_position_embeddings": 131072, "rope_theta": 1e6, "sliding_rope_theta": 1e4},
        ("sliding_rope_theta",),
        full_every=6,
        by_kind=True,
        qk_norm=True,
    ),
)
