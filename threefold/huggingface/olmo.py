"""OLMo 2 and 3 in Hugging Face's format."""

from typing import Any, Final

from threefold.huggingface import mapping as hf
from threefold.huggingface.llama import DEFAULTS, NAMES, LlamaType
from threefold.models.llama import LlamaConfig

_NAMES: Final = NAMES.with_others(
    {
        "attn_out_norm.weight": "post_attention_layernorm.weight",
        "mlp_out_norm.weight": "post_feedforward_layernorm.weight",
    }
)
_DEFAULTS: Final = DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 2048}


class OlmoType(LlamaType):
    """OLMo 2, or 3 with sliding layers, whose rotary positions have no scaling."""

    def _read_block(self, given: hf.ConfigJson) -> dict[str, Any]:
        given.require("hidden_act", "silu", "swish")
        given.require("attention_bias", False)
        base = given.given("rope_theta")
        if self.by_kind and not given.take("rope_parameters") and base not in (None, 5e5):
            # Of such a file, transformers gives the sliding layers another base.
            raise given.refuse("rope_theta", base, "rope_parameters with a rope_theta for each kind of layer")
        return {"norm_position": "after", "qk_norm_over": "width"}

    def write(self, model: LlamaConfig) -> dict[str, Any]:
        written = {**super().write(model), "attention_bias": False}
        return {key: value for key, value in written.items() if key not in ("rope_local_base_freq", "head_dim")}

    def obstacle(self, model: LlamaConfig) -> str | None:
        if model.head_dim * model.num_attention_heads != model.hidden_size:
            return f"model.head_dim {model.head_dim}"
        return super().obstacle(model)


def _type(name: str, head: str, **differences: Any) -> OlmoType:
    fixed = {"norm_position": "after", "qk_norm_over": "width", "sliding_rope_scaling": False}
    given: dict[str, Any] = {"qk_norm": True, "fixed": fixed, "defaults": _DEFAULTS}
    return OlmoType(name, "olmo", head, _NAMES, **given | differences)


TYPES: Final = (
    _type("olmo2", "Olmo2ForCausalLM"),
    _type(
        "olmo3",
        "Olmo3ForCausalLM",
        defaults=_DEFAULTS | {"sliding_window": 4096, "sliding_rope_theta": 5e5},
        window="pattern",
        full_every=4,
        by_kind=True,
        free=frozenset(("attention_pattern", "sliding_rope_theta")),
    ),
)
