"""The family of Llama, Mistral, Mixtral and Qwen: its `model` section, with GQA, QK-norm, sliding windows, experts."""

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from threefold.config.model import MOST_HEADS, MOST_LAYERS, WIDEST
from threefold.config.section import MOST_TOKENS, derived, nearest_divisor
from threefold.models.family import Family
from threefold.models.layers.mixture_config import MixtureConfig

_ROUND: Final = 16  # the default inner width of SwiGLU is a multiple of it


class LlamaConfig(MixtureConfig):
    """Llama, Mistral, Mixtral or Qwen."""

    architecture: Literal["llama"] = "llama"
    num_key_value_heads: int = derived(ge=1, le=MOST_HEADS)
    """For `llama`: number of key-value heads, each shared by a group of query heads (GQA); a divisor of
    `num_attention_heads`, and a multiple of `parallel.tp` or a divisor of it, in which case several ranks have each
    head. Default: `num_attention_heads`."""
    head_dim: int = derived(ge=1, le=WIDEST)
    """For `llama`: width of a head, even. Default: `hidden_size` / `num_attention_heads`."""
    qkv_bias: bool = False
    """For `llama`: whether queries, keys and values have biases, as in Qwen2."""
    qk_norm: bool = False
    """For `llama`: whether each head's queries and keys are normalized (QK-norm), as in Qwen3."""
    sliding_window: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """For `llama`: number of positions, including its own, that a token attends to, as in Mistral; 0 for all."""
    full_attention_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """For `llama`: number of first layers that attend to all positions in spite of `sliding_window`, as in Qwen2."""
    attention_softcap: float = Field(default=0.0, ge=0)
    """For `llama`: limit c of attention scores, which become c · tanh(score / c), as in Gemma 2; 0 for none."""
    comes_after: ClassVar[dict[str, str]] = {
        **MixtureConfig.comes_after,
        "num_key_value_heads": "num_attention_heads",
        "qkv_bias": "norm_eps",
    }
    unlisted: ClassVar[frozenset[str]] = frozenset(("attention_softcap",))

    def default_ffn_hidden_size(self) -> int:
        """Return 8/3 of the hidden size, which gives SwiGLU's three matrices the parameters of a GELU network's two."""
        return -(-8 * self.hidden_size // (3 * _ROUND)) * _ROUND

    def filled(self, sequence_length: int) -> dict[str, Any]:
        values = super().filled(sequence_length) | {
            "num_key_value_heads": self.num_attention_heads,
            "position_embedding": "rope",
            "tie_embeddings": False,
        }
        if self.hidden_size % self.num_attention_heads == 0:
            values["head_dim"] = self.hidden_size // self.num_attention_heads
        return values

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from self.broken_by_setting_unused()
        if self.position_embedding != "rope":
            yield "position_embedding", "model.architecture llama has rotary positions; use rope"
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
        if self.full_attention_layers and not self.sliding_window:
            yield "full_attention_layers", "model.sliding_window is 0, so every layer attends to all positions; use 0"


FAMILY = Family(
    title="Llama",
    config=LlamaConfig,
    model="threefold.models.llama.model:Llama",
    plan="threefold.models.llama.sharding:llama_plan",
    huggingface="threefold.huggingface.llama:TYPES",
    shapes="threefold.models.llama.sharding:layer_shapes",
)
