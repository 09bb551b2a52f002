"""The kinds of models that both sides know."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from threefold.config import ModelConfig

Window = Literal["none", "all", "tail"]


@dataclass(frozen=True)
class Family:
    """What a `model_type` of Hugging Face can be.

    Attributes:
        name: its model_type.
        head: the class that has a language model's head.
        prefix: what the names of all weights but the head's begin with.
        architecture: ours.
        qkv_bias, qk_norm: what these settings may be.
        window: which layers may have a sliding window: none, all alike, or all but the first few.
        experts: whether it has experts.
        shared: whether a gated expert is shared by all tokens.
        defaults: what keys mean that config.json lacks, as in transformers.
    """

    name: str
    head: str
    prefix: str = "model."
    architecture: Literal["gpt", "llama"] = "llama"
    qkv_bias: tuple[bool, ...] = (False,)
    qk_norm: bool = False
    window: Window = "none"
    experts: bool = False
    shared: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()

    def obstacle(self, model: ModelConfig) -> str | None:
        """The first setting of `model`, with its value, that this family has no place for; None where it has all."""
        if model.architecture != self.architecture:
            return f"model.architecture {model.architecture}"
        if self.architecture == "gpt":
            return None if model.position_embedding == "learned" else "model.position_embedding rope"
        found = {
            f"model.qkv_bias {_word(model.qkv_bias)}": model.qkv_bias in self.qkv_bias,
            f"model.qk_norm {_word(model.qk_norm)}": model.qk_norm == self.qk_norm,
            f"model.sliding_window {model.sliding_window}": not model.sliding_window or self.window != "none",
            f"model.full_attention_layers {model.full_attention_layers}": not model.sliding_window
            or not model.full_attention_layers
            or self.window == "tail",
            f"model.num_experts {model.num_experts}": (model.num_experts > 0) == self.experts,
        }
        if self.experts:
            shared = model.shared_expert_ffn_hidden_size
            found |= {
                f"model.shared_expert_ffn_hidden_size {shared}": (shared > 0) == self.shared,
                f"model.shared_expert_gate {_word(model.shared_expert_gate)}": not shared or model.shared_expert_gate,
            }
        if self.name == "mixtral":
            every = all(model.has_experts(layer) for layer in range(model.num_layers))
            found |= {
                "model.normalize_expert_weights false": model.normalize_expert_weights,
                f"model.moe_every {model.moe_every} and model.dense_layers {model.dense_layers}": every,
            }
        return next((setting for setting, fits in found.items() if not fits), None)


FAMILIES: Final = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", "transformer.", "gpt"),
        Family("llama", "LlamaForCausalLM", defaults=(("max_position_embeddings", 2048),)),
        Family(
            "mistral",
            "MistralForCausalLM",
            window="all",
            defaults=(("num_key_value_heads", 8), ("sliding_window", 4096), ("max_position_embeddings", 131072)),
        ),
        Family("qwen2", "Qwen2ForCausalLM", qkv_bias=(True,), window="tail", defaults=(("sliding_window", 4096),)),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            qk_norm=True,
            window="tail",
            defaults=(("head_dim", 128), ("sliding_window", 4096)),
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            window="all",
            experts=True,
            defaults=(
                ("num_key_value_heads", 8),
                ("rms_norm_eps", 1e-5),
                ("rope_theta", 1e6),
                ("max_position_embeddings", 131072),
                ("num_local_experts", 8),
                ("num_experts_per_tok", 2),
            ),
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            qkv_bias=(True, False),
            window="tail",
            experts=True,
            shared=True,
            defaults=(
                ("sliding_window", 4096),
                ("num_experts", 60),
                ("num_experts_per_tok", 4),
                ("moe_intermediate_size", 1408),
                ("shared_expert_intermediate_size", 5632),
            ),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            qk_norm=True,
            window="all",
            experts=True,
            defaults=(
                ("num_key_value_heads", 4),
                ("sliding_window", 4096),
                ("num_experts", 128),
                ("num_experts_per_tok", 8),
                ("moe_intermediate_size", 768),
            ),
        ),
    )
}
COMMON_DEFAULTS: Final[dict[str, Any]] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.001,
}
"""What keys mean that config.json lacks, in most families of Llama's kind."""


def _word(value: bool) -> str:
    return str(value).lower()
