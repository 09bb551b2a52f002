"""Settings of latent attention, for the families that have it."""

from collections.abc import Iterator
from math import log
from typing import Any, ClassVar

from pydantic import Field

from threefold.config.model import WIDEST, ModelConfig, unless_setting
from threefold.config.section import derived


class LatentConfig(ModelConfig):
    """The `model` section of a family with latent attention."""

    query_rank: int = Field(default=0, ge=0, le=WIDEST)
    """For `deepseek`: width of the latent from which all heads' queries are computed; 0 to compute them from the
    block's input, as in DeepSeek-V2-Lite."""
    key_value_rank: int = derived(ge=1, le=WIDEST)
    """For `deepseek`: width of the latent from which all heads' keys and values are computed, and which the KV cache
    keeps. Default: 4 · `plain_head_dim`."""
    plain_head_dim: int = derived(ge=1, le=WIDEST)
    """For `deepseek`: width of the part of a head's queries and keys that does not rotate. Default: `hidden_size` /
    `num_attention_heads`."""
    rope_head_dim: int = derived(ge=2, le=WIDEST)
    """For `deepseek`: width of the part that rotates, even; all heads have the same in their keys. Default: half of
    `plain_head_dim`."""
    value_head_dim: int = derived(ge=1, le=WIDEST)
    """For `deepseek`: width of a head's values. Default: `plain_head_dim`."""
    rope_mscale_all_dim: float = Field(default=0.0, ge=0, le=100)
    """For `deepseek` with `rope_scaling` `yarn`: m in the factor (0.1 · m · ln `rope_factor` + 1)² of the scores
    (`mscale_all_dim` of Hugging Face); 0 for none."""

    comes_after: ClassVar[dict[str, str]] = {
        "query_rank": "num_attention_heads",
        "rope_mscale_all_dim": "rope_attention_factor",
    }

    head_dim = unless_setting(lambda model: model.value_of("plain_head_dim") + model.value_of("rope_head_dim"))
    """Width of a head's queries and keys."""

    @property
    def score_factor(self) -> float:
        """Factor of the scores besides 1 / √`head_dim`."""
        return (0.1 * self.rope_mscale_all_dim * log(self.rope_factor) + 1) ** 2

    def filled(self, sequence_length: int) -> dict[str, Any]:
        values = super().filled(sequence_length) | {"position_embedding": "rope", "tie_embeddings": False}
        plain = self.plain_head_dim
        if plain is None and self.hidden_size % self.num_attention_heads == 0:
            plain = self.hidden_size // self.num_attention_heads
        if plain is None:
            return values
        widths = {"plain_head_dim": plain, "rope_head_dim": -(-plain // 4) * 2, "value_head_dim": plain}
        return values | widths | {"key_value_rank": 4 * plain}

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.rope_scaling != "yarn":
            yield "rope_mscale_all_dim", f"model.rope_scaling is {self.rope_scaling}; use yarn or leave it out"
        yield from super().unused()

    def broken_by_latents(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that break a rule of latent attention, for a family's `broken_rules`."""
        yield from self.broken_by_learned_positions()
        if self.plain_head_dim is None:
            yield from self.broken_by_heads()
            return
        if self.rope_head_dim % 2:
            yield "rope_head_dim", f"must be even for rotary positions; use {self.rope_head_dim + 1}"
        if self.rope_scaling == "dynamic" and self.rope_head_dim == 2:
            yield "rope_scaling", "heads that rotate in 2 dims turn alike whatever the base; use linear"
        yield from self.broken_by_rope()
