"""The `model` section: one docstring per setting."""

from collections.abc import Iterator
from math import log
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from threefold.config.presets import PRESETS, PresetName
from threefold.config.section import MOST_IDS, MOST_TOKENS, Section, derived

Architecture = Literal["gpt", "llama"]
RopeMethod = Literal["none", "linear", "dynamic", "llama3", "yarn"]

FOR_EXPERTS: Final = (
    "experts_per_token",
    "expert_ffn_hidden_size",
    "shared_expert_ffn_hidden_size",
    "shared_expert_gate",
    "normalize_expert_weights",
    "expert_capacity_factor",
    "moe_every",
    "dense_layers",
    "router_aux_loss",
    "router_z_loss",
)
"""Settings that mean nothing without `num_experts`."""
FOR_LLAMA: Final = (
    "num_key_value_heads",
    "head_dim",
    "qkv_bias",
    "qk_norm",
    "sliding_window",
    "full_attention_layers",
    "num_experts",
)
"""Settings that only `llama` has."""
FOR_SCALED_ROPE: Final = (
    "rope_factor",
    "rope_original_positions",
    "rope_low_frequency_factor",
    "rope_high_frequency_factor",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_attention_factor",
)
"""Settings that mean nothing without `rope_scaling`."""
MOST_LAYERS: Final = 1024
_MOST_HEADS: Final = 2**16
_WIDEST: Final = 2**20
_WIDEST_FFN: Final = 2**24
_MOST_EXPERTS: Final = 2**14
_ROUND: Final = 16  # of the default width inside a SwiGLU


class ModelConfig(Section):
    """The network: a decoder in the style of GPT-2, or of Llama and those that followed it."""

    preset: PresetName = derived()
    """A published model whose sizes are taken; settings given beside it override the preset's."""
    architecture: Architecture = "gpt"
    """The family: `gpt` (layer norms, biases, GELU), or `llama` (root-mean-square norms, rotary positions, SwiGLU), of
    which Qwen, Mistral and, with `num_experts`, Mixtral are kinds."""
    num_layers: int = Field(default=8, ge=1, le=MOST_LAYERS)
    """Transformer blocks."""
    hidden_size: int = Field(default=256, ge=1, le=_WIDEST)
    """Width of the residual stream; for `gpt` a multiple of `num_attention_heads`."""
    num_attention_heads: int = Field(default=8, ge=1, le=_MOST_HEADS)
    """Attention heads in each block; a multiple of `parallel.tp`."""
    num_key_value_heads: int = derived(ge=1, le=_MOST_HEADS)
    """For `llama`: heads of keys and values, each shared by as many query heads; a divisor of `num_attention_heads` and
    a multiple of `parallel.tp`. Default: `num_attention_heads`."""
    head_dim: int = derived(ge=1, le=_WIDEST)
    """For `llama`: width of a head, even. Default: `hidden_size` / `num_attention_heads`."""
    ffn_hidden_size: int = derived(ge=1, le=_WIDEST_FFN)
    """Width inside the feed-forward network; a multiple of `parallel.tp`. Default: 4 · `hidden_size` for `gpt`; 8/3 of
    it, up to a multiple of 16, for `llama`."""
    vocab_size: int = derived(ge=1, le=MOST_IDS)
    """Rows of the embedding; at least the tokenizer's vocabulary, divisible by `parallel.tp` or not. Default: the
    tokenizer's vocabulary (a preset's: the published one)."""
    max_position_embeddings: int = derived(ge=1, le=MOST_TOKENS)
    """Longest sequence the model can read. Default: `data.sequence_length`."""
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an element of the embeddings and of what each block adds to the residual stream."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an attention weight."""
    position_embedding: Literal["learned", "rope"] = derived()
    """How the model knows the order of tokens: `learned`, a vector for each position, or `rope`, which turns queries
    and keys by their position (rotary embedding); the width of a head is even for it. `llama` has `rope`. Default:
    `learned` for `gpt`."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the angles of `rope`; a larger one suits longer sequences."""
    rope_scaling: RopeMethod = "none"
    """How `rope` is stretched to sequences longer than the model was first trained on: `linear` (positions divided by
    `rope_factor`), `dynamic` (a larger base, as far as a sequence is too long), `llama3` (low frequencies divided) or
    `yarn` (low frequencies divided, and attention sharpened)."""
    rope_factor: float = Field(default=1.0, ge=1)
    """By how much `rope_scaling` stretches."""
    rope_original_positions: int = derived(ge=1, le=MOST_TOKENS)
    """Longest sequence before `rope_scaling`. Default: `max_position_embeddings`."""
    rope_low_frequency_factor: float = Field(default=1.0, gt=0)
    """For `llama3`: frequencies that turn fewer times than this in `rope_original_positions` are divided fully."""
    rope_high_frequency_factor: float = Field(default=4.0, gt=0)
    """For `llama3`: frequencies that turn more often than this stay."""
    rope_beta_fast: float = Field(default=32.0, gt=0)
    """For `yarn`: frequencies that turn more often than this stay."""
    rope_beta_slow: float = Field(default=1.0, gt=0)
    """For `yarn`: frequencies that turn fewer times than this are divided fully."""
    rope_attention_factor: float = derived(gt=0)
    """For `yarn`: what turned queries and keys are multiplied by. Default: 0.1 · ln `rope_factor` + 1."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """What norms add to a variance."""
    qkv_bias: bool = False
    """For `llama`: whether queries, keys and values have biases, as in Qwen2."""
    qk_norm: bool = False
    """For `llama`: whether each head's queries and keys are normalised, as in Qwen3."""
    sliding_window: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """For `llama`: how many positions back, its own among them, a token attends to, as in Mistral; 0 for all."""
    full_attention_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """For `llama`: the first so many layers attend to everything whatever `sliding_window` says, as in Qwen2."""
    num_experts: int = Field(default=0, ge=0, le=_MOST_EXPERTS)
    """For `llama`: experts among which each token is sent to a few in place of one feed-forward network; 0 for none."""
    experts_per_token: int = Field(default=2, ge=1, le=_MOST_EXPERTS)
    """Experts that each token is sent to."""
    expert_ffn_hidden_size: int = derived(ge=1, le=_WIDEST_FFN)
    """Width inside an expert; a multiple of `parallel.tp`. Default: `ffn_hidden_size`."""
    shared_expert_ffn_hidden_size: int = Field(default=0, ge=0, le=_WIDEST_FFN)
    """Width inside a feed-forward network that every token goes through beside its experts; 0 for none."""
    shared_expert_gate: bool = False
    """Whether a token weighs what the shared expert gives it, as in Qwen2-MoE."""
    normalize_expert_weights: bool = True
    """Whether the weights of a token's experts add up to 1, as in Mixtral."""
    expert_capacity_factor: float = Field(default=0.0, ge=0)
    """Most tokens of a sequence that an expert takes while training, as a multiple of its even share; those that come
    after are passed by. 0 for no limit (dropless)."""
    moe_every: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """With `num_experts`: every so many-th layer has experts, counted so that the last of each run does."""
    dense_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """With `num_experts`: the first so many layers have none."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Weight of the loss that spreads tokens over the experts, for each token and layer beside its own loss."""
    router_z_loss: float = Field(default=0.0, ge=0)
    """Weight of the loss that keeps the router's logits small."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    tie_embeddings: bool = derived()
    """Whether the output head shares the token embedding's weight. Default: `true` for `gpt`, `false` for `llama`."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("preset"), str):
            return given
        return {**PRESETS.get(given["preset"], {}), **given}

    def settings(self) -> dict[str, Any]:
        """The settings that have a value, without those that mean nothing in this family and are as they were."""
        idle = {name for name in self.meaningless() if getattr(self, name) == self.at_rest(name)}
        return {name: value for name, value in super().settings().items() if name not in idle}

    def meaningless(self) -> Iterator[str]:
        """Settings that the model does not look at, for what others are."""
        yield from () if self.architecture == "llama" else FOR_LLAMA
        yield from () if self.num_experts else FOR_EXPERTS
        yield from () if self.rope_scaling != "none" else FOR_SCALED_ROPE

    def at_rest(self, name: str) -> Any:
        """What a setting is where nobody sets it."""
        return self.filled(self.max_position_embeddings or 0).get(name, type(self).model_fields[name].default)

    def filled(self, sequence_length: int) -> dict[str, Any]:
        """Values of the settings that follow from others."""
        llama = self.architecture == "llama"
        ffn = -(-8 * self.hidden_size // (3 * _ROUND)) * _ROUND if llama else 4 * self.hidden_size
        positions = self.max_position_embeddings or sequence_length
        values = {
            "num_key_value_heads": self.num_attention_heads,
            "ffn_hidden_size": ffn,
            "max_position_embeddings": positions,
            "position_embedding": "rope" if llama else "learned",
            "rope_original_positions": positions,
            "rope_attention_factor": 0.1 * log(self.rope_factor) + 1 if self.rope_scaling == "yarn" else 1.0,
            "expert_ffn_hidden_size": self.ffn_hidden_size or ffn,
            "tie_embeddings": not llama,
        }
        if self.hidden_size % self.num_attention_heads == 0:
            values["head_dim"] = self.hidden_size // self.num_attention_heads
        return values

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, from 0, has experts."""
        return self.num_experts > 0 and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    def window(self, layer: int) -> int:
        """How many positions back the tokens of a layer attend; 0 for all."""
        return self.sliding_window if layer >= self.full_attention_layers else 0
