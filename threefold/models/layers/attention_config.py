"""Settings of attention, for the families whose layers may differ in it: its heads, windows, positions and norms."""

import re
from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from threefold.config.model import MOST_HEADS, MOST_LAYERS, WIDEST, ModelConfig
from threefold.config.section import MOST_TOKENS, derived

KINDS: Final = ("full", "sliding")
"""Kinds of attention that `attention_pattern` may give to a layer."""
_LayerCount = Annotated[int, Field(ge=0, le=MOST_LAYERS)]


class AttentionConfig(ModelConfig):
    """The `model` section of a family whose attention has these settings."""

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
    full_attention_layers: _LayerCount = 0
    """For `llama`: number of first layers that attend to all positions in spite of `sliding_window`, as in Qwen2."""
    attention_pattern: str | list[str] = Field(default="", examples=["5 sliding : 1 full"])
    """For `llama`: attention of each layer: a list of `full` and `sliding` (within `sliding_window`), or a period such
    as `5 sliding : 1 full`, which is repeated over the layers. Default: all layers after `full_attention_layers` are
    sliding if there is a `sliding_window`."""
    sliding_rope_theta: float = derived(gt=0)
    """For `llama`: `rope_theta` of sliding layers, as in Gemma 3. Default: `rope_theta`."""
    sliding_rope_scaling: bool = True
    """For `llama`: whether `rope_scaling` holds in sliding layers too; in OLMo 3 and Gemma 3 it does not."""
    rotary_share: float = Field(default=1.0, gt=0, le=1)
    """For `llama`: share of a head's width that `rope` rotates, its first part, as in GLM-4 (0.5)."""
    qk_norm_over: Literal["head", "width"] = "head"
    """For `llama`: whether `qk_norm` normalizes each head by itself, or all heads together, as in OLMo 2."""
    attention_scale: float = derived(gt=0)
    """For `llama`: factor of the attention scores. Default: `head_dim` to the power of -0.5."""
    attention_softcap: float = Field(default=0.0, ge=0)
    """For `llama`: limit c of attention scores, which become c · tanh(score / c), as in Gemma 2; 0 for none."""
    attention_sinks: bool = False
    """For `llama`: whether each head has a trained score that joins the denominator of its softmax, as in gpt-oss."""
    attention_gate: bool = False
    """For `llama`: whether the output of each head is multiplied by the sigmoid of a projection, as in Qwen3-Next."""
    proj_bias: bool = False
    """For `llama`: whether the projection after attention has a bias."""

    comes_after: ClassVar[dict[str, str]] = {"num_key_value_heads": "num_attention_heads", "qkv_bias": "norm_eps"}
    unlisted: ClassVar[frozenset[str]] = frozenset(
        ("attention_pattern", "sliding_rope_theta", "sliding_rope_scaling", "rotary_share", "qk_norm_over")
    ) | {"attention_scale", "attention_softcap", "attention_sinks", "attention_gate", "proj_bias"}

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated."""
        return int(self.head_dim * self.rotary_share)

    def window(self, layer: int) -> int:
        if not self.attention_pattern:
            return super().window(layer)
        return self.sliding_window if attention_kind(self.attention_pattern, layer) == "sliding" else 0

    def rope_base(self, layer: int) -> float:
        """Return the base of a layer's rotary angles."""
        return self.sliding_rope_theta if self.window(layer) else self.rope_theta

    def scales_rope(self, layer: int) -> bool:
        """Return whether `rope_scaling` holds in a layer."""
        return self.sliding_rope_scaling or not self.window(layer)

    def filled(self, sequence_length: int) -> dict[str, Any]:
        values = super().filled(sequence_length)
        head_dim = self.head_dim
        if self.hidden_size % self.num_attention_heads == 0:
            values["head_dim"] = self.hidden_size // self.num_attention_heads
            head_dim = head_dim or values["head_dim"]
        if head_dim:
            values["attention_scale"] = head_dim**-0.5
        return values | {
            "num_key_value_heads": self.num_attention_heads,
            "sliding_rope_theta": self.rope_theta,
        }

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect given the others, each with the rule against setting it."""
        if not self.sliding_window:
            for name in ("sliding_rope_theta", "sliding_rope_scaling"):
                yield name, "model.sliding_window is 0; use sliding_window 1024 or leave it out"
        elif self.rope_scaling == "none":
            rule = "model.rope_scaling is none; use rope_scaling linear or leave it out"
            yield "sliding_rope_scaling", rule
        if not self.qk_norm:
            yield "qk_norm_over", "model.qk_norm is false; use qk_norm true or leave it out"
        yield from super().unused()

    def broken_by_attention(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that break a rule of attention, each with the rule, for a family's `broken_rules`."""
        if self.full_attention_layers and not self.sliding_window:
            yield "full_attention_layers", "model.sliding_window is 0, so every layer attends to all positions; use 0"
        if self.rotary_share < 1 and (self.rotary_dim % 2 or not self.rotary_dim):
            width, even = self.head_dim, max(2, round(self.head_dim * self.rotary_share / 2) * 2)
            rule = f"rotates {self.rotary_dim} of the {width} features of a head, which must be even"
            yield "rotary_share", f"{rule}; use {ceil(even / width * 1e6) / 1e6:g}"  # no less than the even width
        if self.attention_pattern != "":
            yield from self._broken_by_pattern(self.attention_pattern)

    def _broken_by_pattern(self, pattern: str | list[str]) -> Iterator[tuple[str, str]]:
        kinds = list(_period(pattern)) if isinstance(pattern, str) else pattern
        wrong = [kind for kind in kinds if kind not in KINDS]
        if wrong:
            rule = f"has {wrong[0]!r} for a layer, which is full or sliding"
            yield "attention_pattern", f"{rule}; use '1 sliding : 1 full'"
        elif isinstance(pattern, list) and len(pattern) != self.num_layers:
            rule = f"has {len(pattern)} layers and model.num_layers is {self.num_layers}"
            yield "attention_pattern", f"{rule}; give {self.num_layers} of them or a period like '1 sliding : 1 full'"
        elif "sliding" in kinds and not self.sliding_window:
            yield "attention_pattern", "model.sliding_window is 0; use sliding_window 1024 with it"
        elif self.sliding_window and not any(self.window(layer) for layer in range(self.num_layers)):
            rule = f"has no sliding layer and model.sliding_window is {self.sliding_window}"
            yield "attention_pattern", f"{rule}; use '1 sliding : 1 full', or sliding_window 0"
        if self.full_attention_layers:
            rule = f"model.full_attention_layers is {self.full_attention_layers}, which says the same otherwise"
            yield "attention_pattern", f"{rule}; use full_attention_layers 0 with it"


def attention_kind(pattern: str | list[str], layer: int) -> str:
    """Return the kind of attention that a pattern gives to a layer."""
    kinds = _period(pattern) if isinstance(pattern, str) else pattern
    return kinds[layer % len(kinds)]


@lru_cache(maxsize=64)
def _period(pattern: str) -> tuple[str, ...]:
    """Return the kinds of a period such as `5 sliding : 1 full`; of a part that is not written so, the part."""
    kinds: list[str] = []
    for part in pattern.split(":"):
        found = re.fullmatch(r"\s*(?:(\d{1,4})\s+)?(\w+)\s*", part)
        kinds += [found[2]] * int(found[1] or 1) if found else [part.strip()]
    return tuple(kinds)
