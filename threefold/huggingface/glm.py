"""GLM-4 in Hugging Face's format, whose rotary pairs are neighbors."""

from typing import Any, Final

from threefold.huggingface import mapping as hf
from threefold.huggingface.llama import DEFAULTS, NAMES, LlamaType
from threefold.models.llama import LlamaConfig

_NAMES: Final = NAMES.with_others(
    {
        "attn_out_norm.weight": "post_self_attn_layernorm.weight",
        "mlp_out_norm.weight": "post_mlp_layernorm.weight",
    }
)


class GlmType(LlamaType):
    """GLM-4, with norms around each half (`glm4`) or before it (`glm`)."""

    def _read_block(self, given: hf.ConfigJson) -> dict[str, Any]:
        given.require("hidden_act", "silu", "swish")
        return {"qkv_bias": given.flag("attention_bias", True), "norm_position": self.fixed["norm_position"]}

    def write(self, model: LlamaConfig) -> dict[str, Any]:
        return {**super().write(model), "attention_bias": model.qkv_bias}


def _type(name: str, head: str, position: str) -> GlmType:
    usual = {"max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128}
    return GlmType(
        name,
        "glm",
        head,
        _NAMES,
        defaults=DEFAULTS | usual,
        qkv_bias=(True, False),
        fused=frozenset(("gate_up",)),
        pairs_neighbors=True,
        usual_share=0.5,
        fixed={"norm_position": position},
        free=frozenset(("rotary_share",)),
    )


TYPES: Final = (_type("glm4", "Glm4ForCausalLM", "both"), _type("glm", "GlmForCausalLM", "before"))
