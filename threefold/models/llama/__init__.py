"""The family of Llama, Mistral, Mixtral and Qwen: its `model` section, with GQA, QK-norm, sliding windows, experts."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from threefold.config.model import Activation
from threefold.config.section import derived, nearest_divisor
from threefold.models.family import Family
from threefold.models.layers.attention_config import AttentionConfig
from threefold.models.layers.mixture_config import MixtureConfig
from threefold.models.layers.prediction_config import PredictionConfig
from threefold.models.layers.width_config import WidthConfig

NormPosition = Literal["before", "after", "both"]


class LlamaConfig(AttentionConfig, MixtureConfig, PredictionConfig, WidthConfig):
    """Llama, Mistral, Mixtral or Qwen."""

    architecture: Literal["llama"] = "llama"
    norm_position: NormPosition = "before"
    """For `llama`: where each half of a block has its norm: before it, on its output, as in OLMo 2, or both, as in
    Gemma 2."""
    norm_offset: bool = False
    """For `llama`: whether the factors of norms are 1 + their weights, which start at 0, as in Gemma."""
    gate_activation: Activation = "silu"
    """For `llama`: activation function of the gates of the feed-forward network, with the names of `activation`."""
    embedding_scale: float = derived(gt=0)
    """For `llama`: factor of the token embeddings. Default: 1."""
    logit_softcap: float = Field(default=0.0, ge=0)
    """For `llama`: limit c of the logits, which become c · tanh(logits / c), as in Gemma 2; 0 for none."""

    comes_after: ClassVar[dict[str, str]] = {**MixtureConfig.comes_after, **AttentionConfig.comes_after}
    unlisted: ClassVar[frozenset[str]] = (
        AttentionConfig.unlisted
        | MixtureConfig.unlisted
        | PredictionConfig.unlisted
        | WidthConfig.unlisted
        | frozenset(("norm_position", "norm_offset", "gate_activation", "embedding_scale", "logit_softcap"))
    )

    def filled(self, sequence_length: int) -> dict[str, Any]:
        values = super().filled(sequence_length)
        if self.width_base and "attention_scale" in values:
            values["attention_scale"] = 1 / (self.head_dim or values["head_dim"])
        return values | {
            "position_embedding": "rope",
            "tie_embeddings": False,
            "embedding_scale": 1.0,
        }

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect given the others, each with the rule against setting it."""
        all_experts = all(self.has_experts(layer) for layer in range(self.num_layers))
        if all_experts and self.expert_gate_limit and not self.shared_expert_ffn_hidden_size:
            rule = f"all gates are of experts, and model.expert_gate_limit is {self.expert_gate_limit:g}"
            yield "gate_activation", f"{rule}; use expert_gate_limit 0 or leave it out"
        yield from super().unused()

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from self.broken_by_setting_unused()
        yield from self.broken_by_learned_positions()
        if self.head_dim is None:
            yield from self.broken_by_heads()
        heads, key_value = self.num_attention_heads, self.num_key_value_heads
        if heads % key_value:
            nearest = nearest_divisor(key_value, heads)
            yield "num_key_value_heads", f"must divide model.num_attention_heads {heads}; use {nearest}"
        if self.head_dim % 2:
            yield "head_dim", f"must be even for rotary positions; use {self.head_dim + 1}"
        yield from self.broken_by_rope()
        yield from self.broken_by_experts()
        yield from self.broken_by_attention()
        if self.width_base and self.mtp_layers:
            yield "width_base", f"model.mtp_layers is {self.mtp_layers}, for which µP has no rules here; use 0"


FAMILY = Family(
    title="Llama",
    config=LlamaConfig,
    model="threefold.models.llama.model:Llama",
    plan="threefold.models.llama.sharding:llama_plan",
    huggingface="threefold.huggingface.llama:TYPES",
    shapes="threefold.models.llama.sharding:layer_shapes",
)
