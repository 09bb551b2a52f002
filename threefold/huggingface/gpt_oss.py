"""gpt-oss in Hugging Face's format; its MXFP4 checkpoints are refused as quantized (`files`)."""

from collections.abc import Collection
from typing import Any, Final

from threefold.huggingface import mapping as hf
from threefold.huggingface.llama import DEFAULTS, NAMES, LlamaType, write_routing
from threefold.models.llama import LlamaConfig

_ALPHA: Final = 1.702  # of the experts' gates, which is fixed
_STACKS: Final = {"mlp.experts.gate_up": "mlp.experts.gate_up_proj", "mlp.experts.down": "mlp.experts.down_proj"}
"""Stacks of all experts' matrices, [experts, in, out] in the files; gates and ups alternate in both."""
_NAMES: Final = NAMES.with_others(
    {
        "attn.core.sinks": "self_attn.sinks",
        "attn.proj.bias": "self_attn.o_proj.bias",
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.bias": "mlp.router.bias",
        "mlp.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
    }
)
_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary positions of a config.json without them, as in transformers."""


class GptOssType(LlamaType):
    """gpt-oss: every layer has experts, sliding and full layers alternate, and each head has a sink."""

    def read(self, given: hf.ConfigJson) -> dict[str, Any]:
        if not given.given("rope_parameters") and not given.given("rope_scaling"):
            given = given.with_values(rope_parameters=_YARN)
        return super().read(given)

    def _read_block(self, given: hf.ConfigJson) -> dict[str, Any]:
        given.require("hidden_act", "silu", "swish")
        given.require("swiglu_alpha", _ALPHA, None)
        for ignored in ("experts_per_token", "initial_context_length"):  # of OpenAI's own code
            given.take(ignored)
        limit = float(given.number("swiglu_limit"))
        if limit <= 0:
            raise given.problem(f"swiglu_limit is {limit} but must be above 0")
        biased = given.flag("attention_bias", True)
        return {"attention_sinks": True, "qkv_bias": biased, "proj_bias": biased, "expert_gate_limit": limit}

    def _read_experts(self, given: hf.ConfigJson, layers: int) -> dict[str, Any]:
        per_token = given.whole("num_experts_per_tok", least=1)
        return {
            "num_experts": given.whole("num_local_experts", least=1, most=hf.MOST_EXPERTS),
            "experts_per_token": per_token,
            "expert_ffn_hidden_size": given.whole("intermediate_size", least=1),
            "router": "softmax_chosen",
            "router_bias": True,
            "expert_bias": True,
            "router_aux_loss": float(given.number("router_aux_loss_coef")) * per_token / layers,
        }

    def write(self, model: LlamaConfig) -> dict[str, Any]:
        return {
            **super().write(model),
            "attention_bias": model.qkv_bias,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": model.expert_gate_limit,
        }

    def _write_experts(self, model: LlamaConfig) -> dict[str, Any]:
        sizes = {"num_local_experts": model.num_experts, "intermediate_size": model.expert_ffn_hidden_size}
        return write_routing(model) | sizes

    def obstacle(self, model: LlamaConfig) -> str | None:
        if model.num_experts and not all(model.has_experts(layer) for layer in range(model.num_layers)):
            return f"model.moe_every {model.moe_every} and model.dense_layers {model.dense_layers}"
        if model.qkv_bias != model.proj_bias:
            return f"model.proj_bias {str(model.proj_bias).lower()}"
        if not model.expert_gate_limit:
            return "model.expert_gate_limit 0"
        return super().obstacle(model)

    def rearranged(
        self, name: str, in_block: str, block: str, model: LlamaConfig, shapes: hf.Shapes, present: Collection[str]
    ) -> list[hf.WeightMap]:
        if in_block in _STACKS:
            return [hf.WeightMap(name, shapes[name], (hf.SourceRows(block + _STACKS[in_block]),), transposed=True)]
        return super().rearranged(name, in_block, block, model, shapes, present)


TYPES: Final = (
    GptOssType(
        "gpt_oss",
        "gpt_oss",
        "GptOssForCausalLM",
        _NAMES,
        defaults=DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "max_position_embeddings": 131072,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        qkv_bias=(True, False),
        window="pattern",
        full_every=2,
        experts=True,
        fixed={"attention_sinks": True, "router": "softmax_chosen", "router_bias": True, "expert_bias": True},
        free=frozenset(("attention_pattern", "proj_bias", "expert_gate_limit")),
    ),
)
