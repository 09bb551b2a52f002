"""The `model` section of a config, with the settings that all model families share."""

from collections.abc import Callable, Iterator
from math import log, sqrt
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, cast

from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from threefold.config.presets import PRESETS, PresetName
from threefold.config.section import MOST_TOKENS, NameIn, Section, derived, nearest_divisor
from threefold.constants import MOST_IDS
from threefold.errors import UserError
from threefold.files import require_local, shown
from threefold.plugins import Registry


def split_model_file(text: str, setting: str = "--model") -> tuple[Path, str]:
    """Split `FILE.py[:NAME]` into the resolved path and the name; the error for a missing file names `setting`."""
    require_local(text, setting)
    file, _, name = text.partition(":")
    if not Path(file).is_file():
        raise UserError(
            f"{setting} is {shown(text)} but {shown(file)} is not a file; name a Python file, as in model.py:MyModel."
        )
    return Path(file).resolve(), name


T = TypeVar("T")

MOST_LAYERS: Final = 1024
MOST_HEADS: Final = 2**16
WIDEST: Final = 2**20
WIDEST_FFN: Final = 2**24
_RopeFactor = Annotated[float, Field(gt=0)]

CUSTOM: Final = "own"  # family of models from a user's own file or program
Activation = Literal["gelu_tanh", "gelu", "quick_gelu", "relu", "relu2", "silu"]
SILU: Final[Activation] = "silu"

FAMILIES: Final = Registry(
    "model.architecture",
    "threefold.model_families",
    {
        "gpt": "threefold.models.gpt:FAMILY",
        "llama": "threefold.models.llama:FAMILY",
        "olmo": "threefold.models.llama.families:OLMO",
        "gemma": "threefold.models.llama.families:GEMMA",
        "glm": "threefold.models.llama.families:GLM",
        "gpt_oss": "threefold.models.llama.families:GPT_OSS",
        "deepseek": "threefold.models.deepseek:FAMILY",
        "own": "threefold.models.family:CUSTOM_FAMILY",
    },
)
"""Model families, each a `threefold.models.family.Family`, whose `config` is the class of its `model` section."""


class _UnlessSetting:
    """Value of a family that lacks a setting; a family that has it declares a field of the same name.

    A field's value is in the instance's `__dict__`, which Python searches before a descriptor without `__set__`.
    Access on the class raises AttributeError, so pydantic sees no field that shadows an attribute.
    """

    def __init__(self, value: Callable[[Any], Any]) -> None:
        self._value = value

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise AttributeError
        return self._value(instance)


def unless_setting(value: "Callable[[ModelConfig], T]") -> T:
    return cast(T, _UnlessSetting(value))


class ModelConfig(Section):
    """The model: a decoder like GPT-2, or like Llama and its successors."""

    model_config = ConfigDict(ignored_types=(_UnlessSetting,))

    preset: PresetName = derived()
    """Published model whose sizes are used; other settings that are given override the preset's."""
    architecture: Annotated[str, NameIn(FAMILIES)] = "gpt"
    """Model family: `gpt` (LayerNorm, biases, GELU); `llama` (RMSNorm, rotary positions, SwiGLU), which includes Qwen,
    Mistral, Phi and, with `num_experts`, Mixtral; `olmo`, `gemma`, `glm` and `gpt_oss`, which are `llama` with other
    defaults; `deepseek`, like `llama` but for its latent attention; or `own`, the model in `file`."""
    num_layers: int = Field(default=8, ge=1, le=MOST_LAYERS)
    """Number of transformer blocks."""
    hidden_size: int = Field(default=256, ge=1, le=WIDEST)
    """Width of the residual stream; a multiple of `num_attention_heads` for `gpt`."""
    num_attention_heads: int = Field(default=8, ge=1, le=MOST_HEADS)
    """Attention heads in each block; a multiple of `parallel.tp`."""
    ffn_hidden_size: int = derived(ge=1, le=WIDEST_FFN)
    """Width of the feed-forward network; a multiple of `parallel.tp`. Default: 4 · `hidden_size` for `gpt`; 8/3 ·
    `hidden_size`, rounded up to a multiple of 16, for `llama` and `deepseek`."""
    vocab_size: int = derived(ge=1, le=MOST_IDS)
    """Rows of the embedding: at least the tokenizer's vocabulary; need not be divisible by `parallel.tp`. Default: the
    tokenizer's vocabulary (a preset's: the published one)."""
    max_position_embeddings: int = derived(ge=1, le=MOST_TOKENS)
    """Longest sequence that the model can read. Default: `data.sequence_length`."""
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the outputs that each block adds to the residual stream, and of the embeddings (for `gpt`,
    unless `embedding_dropout` is given)."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of attention weights."""
    position_embedding: Literal["learned", "rope"] = derived()
    """Position encoding: `learned`, one vector per position, or `rope` (rotary position embedding), which rotates
    queries and keys and needs an even head width. Default: `learned` for `gpt`; all others have `rope`."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the angles of `rope`; longer sequences need a larger one."""
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    """How `rope` is extended to sequences longer than the model was first trained on: `linear` (positions divided by
    `rope_factor`), `dynamic` (a base that grows with the excess length), `llama3` (low frequencies divided), `yarn`
    (low frequencies divided, attention sharpened) or `longrope` (each frequency divided by a factor of its own)."""
    rope_factor: float = Field(default=1.0, ge=1)
    """Factor by which `rope_scaling` extends the context."""
    rope_original_positions: int = derived(ge=1, le=MOST_TOKENS)
    """Longest sequence before `rope_scaling`. Default: `max_position_embeddings`."""
    rope_low_frequency_factor: float = Field(default=1.0, gt=0)
    """For `llama3`: frequencies with fewer turns than this in `rope_original_positions` are divided fully."""
    rope_high_frequency_factor: float = Field(default=4.0, gt=0)
    """For `llama3`: frequencies with more turns than this stay unchanged."""
    rope_beta_fast: float = Field(default=32.0, gt=0)
    """For `yarn`: frequencies with more turns than this stay unchanged."""
    rope_beta_slow: float = Field(default=1.0, gt=0)
    """For `yarn`: frequencies with fewer turns than this are divided fully."""
    rope_attention_factor: float = derived(gt=0)
    """For `yarn` and `longrope`: factor applied to rotated queries and keys. Default: 0.1 · ln `rope_factor` + 1, and
    for `longrope` √(1 + ln `rope_factor` / ln `rope_original_positions`)."""
    rope_truncate: bool = True
    """For `yarn`: whether the bounds between kept and divided frequencies are rounded to whole dims; not in gpt-oss."""
    rope_short_factors: tuple[_RopeFactor, ...] = Field(default=(), max_length=WIDEST // 2, strict=False)
    """For `longrope`: divisor of each frequency in sequences of at most `rope_original_positions`, for every two
    features that rotate."""
    rope_long_factors: tuple[_RopeFactor, ...] = Field(default=(), max_length=WIDEST // 2, strict=False)
    """For `longrope`: divisors of frequencies in longer sequences, as long as `rope_short_factors`."""
    norm_eps: float = Field(default=1e-5, gt=0, le=1)
    """Epsilon that norms add to the variance."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    tie_embeddings: bool = derived()
    """Whether the output head shares the token embedding's weight. Default: `true` for `gpt` alone."""

    comes_after: ClassVar[dict[str, str]] = {}
    """Setting of one family → the common setting after which it and its successors are listed; otherwise at the end."""
    unlisted: ClassVar[frozenset[str]] = frozenset(("rope_truncate", "rope_short_factors", "rope_long_factors"))
    """Settings that a resolved config leaves out where they have their default, like settings without effect."""

    _of_others: dict[str, "ModelConfig"] = PrivateAttr(default_factory=dict)
    """Given settings that belong to another family, each with a config that holds it."""

    # Values for families that do not have the setting, which is explained in those that have it.

    num_key_value_heads = unless_setting(lambda model: model.num_attention_heads)
    head_dim = unless_setting(lambda model: model.hidden_size // model.num_attention_heads)
    embedding_dropout = unless_setting(lambda model: model.hidden_dropout)
    activation = unless_setting(lambda model: "gelu_tanh")
    qk_norm = unless_setting(lambda model: False)
    attention_softcap = unless_setting(lambda model: 0.0)
    qk_norm_over = unless_setting(lambda model: "head")
    norm_position = unless_setting(lambda model: "before")
    norm_offset = unless_setting(lambda model: False)
    gate_activation = unless_setting(lambda model: SILU)
    embedding_scale = unless_setting(lambda model: 1.0)
    logit_softcap = unless_setting(lambda model: 0.0)
    attention_pattern = unless_setting(lambda model: cast("str | list[str]", ""))
    rotary_share = unless_setting(lambda model: 1.0)
    attention_sinks = unless_setting(lambda model: False)
    sliding_window = unless_setting(lambda model: 0)
    full_attention_layers = unless_setting(lambda model: 0)
    key_value_rank = unless_setting(lambda model: 0)
    rope_head_dim = unless_setting(lambda model: 0)
    num_experts = unless_setting(lambda model: 0)
    experts_per_token = unless_setting(lambda model: 0)
    expert_ffn_hidden_size = unless_setting(lambda model: 0)
    shared_expert_ffn_hidden_size = unless_setting(lambda model: 0)
    router = unless_setting(lambda model: "softmax")
    router_groups = unless_setting(lambda model: 0)
    expert_bias = unless_setting(lambda model: False)
    expert_gate_limit = unless_setting(lambda model: 0.0)
    router_groups_chosen = unless_setting(lambda model: 1)
    moe_every = unless_setting(lambda model: 1)
    dense_layers = unless_setting(lambda model: 0)
    mtp_layers = unless_setting(lambda model: 0)
    mtp_loss = unless_setting(lambda model: 0.0)
    file = unless_setting(lambda model: "")
    arguments = unless_setting(lambda model: dict[str, Any]())
    width_base = unless_setting(lambda model: 0)

    @property
    def blocks(self) -> int | None:
        """Number of blocks; None if the config does not determine it."""
        return self.num_layers

    @property
    def title(self) -> str:
        """Name for titles and summaries: the preset, a custom model's file, or the family; the last with its sizes."""
        preset = PRESETS.get(self.preset or "", {})
        if preset and all(self.value_of(name) == value for name, value in preset.items()):
            return str(self.preset)
        if self.file:
            return self.file.rpartition("/")[-1]
        sizes = f", {self.blocks} layers of width {self.hidden_size:,}" if self.blocks is not None else ""
        return f"{self.preset or self.architecture}{sizes}"

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that `rope` rotates."""
        return self.rope_head_dim or self.head_dim

    @property
    def width(self) -> float:
        """The width in units of the base width of µP; 1 without µP."""
        return self.hidden_size / self.width_base if self.width_base else 1.0

    @property
    def has_expert_bias(self) -> bool:
        """Whether the choice of experts adds a bias to each one's score."""
        return False

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return self.num_experts > 0 and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    def window(self, layer: int) -> int:
        """Return how many positions back the tokens of a layer attend; 0 for all."""
        return self.sliding_window if layer >= self.full_attention_layers else 0

    # Defaults that a family may override.

    def filled(self, sequence_length: int) -> dict[str, Any]:
        """Return the values of the settings that are derived from others."""
        positions = self.max_position_embeddings or sequence_length
        return {
            "ffn_hidden_size": self.default_ffn_hidden_size(),
            "max_position_embeddings": positions,
            "position_embedding": "learned",
            "rope_original_positions": positions,
            "rope_attention_factor": self._rope_attention_factor(self.rope_original_positions or positions),
            "tie_embeddings": True,
        }

    def _rope_attention_factor(self, original_positions: int) -> float:
        if self.rope_scaling == "longrope":
            return longrope_attention_factor(self.rope_factor, original_positions)
        return 0.1 * log(self.rope_factor) + 1 if self.rope_scaling == "yarn" else 1.0

    def default_ffn_hidden_size(self) -> int:
        """Return the width of the feed-forward network if it is not given."""
        return 4 * self.hidden_size

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect, each with the rule against setting it."""
        if self.rope_scaling == "none":
            for name in FOR_SCALED_ROPE:
                yield name, "model.rope_scaling is none; use rope_scaling linear or leave it out"

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield settings of a resolved config that break a rule of the family, with the rule as it follows 'but'."""
        yield from self.broken_by_setting_unused()
        yield from self.broken_by_heads()
        if self.position_embedding == "rope" and self.head_dim % 2:
            rule = "the width of a head, model.hidden_size / model.num_attention_heads"
            nearest = (self.head_dim + 1) * self.num_attention_heads
            rule = f"{rule} = {self.head_dim}, must be even for it; use model.hidden_size {nearest}, or learned"
            yield "position_embedding", rule
        yield from self.broken_by_rope()

    # Parts of `broken_rules`, for a family to choose from.

    def broken_by_setting_unused(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect, unless they have their default value."""
        for name in model_settings():
            if (other := self._of_others.get(name)) and not other.is_as_unset(name):
                rule = f"model.architecture is {self.architecture}, which has no such thing"
                rule += f"; use architecture {other.architecture} or leave it out"
                yield name, dict(other.unused()).get(name, rule)
        yield from ((name, rule) for name, rule in self.unused() if not self.is_as_unset(name))

    def broken_by_heads(self) -> Iterator[tuple[str, str]]:
        if self.hidden_size % self.num_attention_heads:
            nearest = nearest_divisor(self.num_attention_heads, self.hidden_size)
            yield "num_attention_heads", f"must divide model.hidden_size {self.hidden_size}; use {nearest}"

    def broken_by_learned_positions(self) -> Iterator[tuple[str, str]]:
        if self.position_embedding != "rope":
            yield "position_embedding", f"model.architecture {self.architecture} has rotary positions; use rope"

    def broken_by_rope(self) -> Iterator[tuple[str, str]]:
        if self.rope_scaling != "none" and self.position_embedding != "rope":
            yield "rope_scaling", "model.position_embedding is learned; use none, or rope"
        if self.rope_scaling == "dynamic" and self.head_dim == 2:
            yield "rope_scaling", "heads of width 2 turn alike whatever the base; use linear"
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:
            yield "rope_theta", "must be above 1 for model.rope_scaling yarn; use 10000"
        pairs = self.rotary_dim // 2
        for name in ("rope_short_factors", "rope_long_factors"):
            factors = getattr(self, name)
            if factors and self.rope_scaling not in ("none", "longrope"):
                yield name, f"model.rope_scaling is {self.rope_scaling}; use longrope or leave it out"
            elif self.rope_scaling == "longrope" and len(factors) != pairs:
                rule = f"has {len(factors)} factors and {2 * pairs} features of a head rotate; give {pairs}"
                yield name, f"{rule}, such as {[1.0] * min(pairs, 2)}"
        # In turns within the original positions, between which the division of frequencies fades out.
        ramps = {"rope_low_frequency_factor": "rope_high_frequency_factor", "rope_beta_slow": "rope_beta_fast"}
        for low, high in ramps.items():
            end = getattr(self, high)
            if getattr(self, low) >= end:
                yield low, f"must be below model.{high} {end:g}; use {end / 4:g}"

    # Reading and writing of a section.

    @model_validator(mode="wrap")
    @classmethod
    def _read_as_family(cls, given: Any, read: Callable[[Any], "ModelConfig"]) -> "ModelConfig":
        """Validate as the family's own class; settings of other families are set aside for `broken_rules`."""
        if not isinstance(given, dict):
            return read(given)
        preset = given.get("preset")
        given = {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **given}
        if cls is ModelConfig:
            name = given.get("architecture")
            if name is None:
                name = CUSTOM if given.get("file") else cls.model_fields["architecture"].default
            if isinstance(name, str) and name in FAMILIES:
                return FAMILIES.load(name).config.model_validate(given)
        foreign: dict[Any, type[ModelConfig]] = {}
        for name in (each for each in given if each not in cls.model_fields):
            kinds = (FAMILIES.load(each).config for each in FAMILIES.names())
            if (kind := next((each for each in kinds if name in each.model_fields), None)) is not None:
                foreign[name] = kind
        config = read({name: value for name, value in given.items() if name not in foreign})
        for kind in dict.fromkeys(foreign.values()):
            common = {name: getattr(config, name) for name in ModelConfig.model_fields if name != "architecture"}
            others = {name: given[name] for name in foreign if foreign[name] is kind}
            other = kind.model_validate({**common, **others})
            config._of_others.update(dict.fromkeys((name for name in others if given[name] is not None), other))
        return config

    def value_of(self, name: str) -> Any:
        """Return the given value of a setting, whether or not this family has it."""
        return getattr(self._of_others.get(name, self), name)

    def is_as_unset(self, name: str) -> bool:
        """Return whether a setting has its default value."""
        unset = self.filled(self.max_position_embeddings or 0).get(name, type(self).model_fields[name].default)
        return bool(getattr(self, name) == unset)

    def settings(self) -> dict[str, Any]:
        """Return the settings that have a value, but no default of settings without effect or in `unlisted`.

        A default that was given instead of the preset's value stays, since the preset is read again with the rest.
        """
        preset = PRESETS.get(self.preset or "", {})
        idle = {name for name in self.unlisted.union(dict(self.unused())) if self.is_as_unset(name)}
        idle -= {name for name in idle & preset.keys() if preset[name] != getattr(self, name)}
        values = {name: value for name, value in super().settings().items() if name not in idle}
        if not values.keys() - ModelConfig.model_fields.keys() and not self._of_others:
            return values
        values |= {name: getattr(other, name) for name, other in self._of_others.items() if not other.is_as_unset(name)}
        return {name: values[name] for name in model_settings() if name in values}


FOR_SCALED_ROPE: Final = tuple(
    name for name in ModelConfig.model_fields if name.startswith("rope_") and name not in ("rope_theta", "rope_scaling")
)
"""Settings that have no effect without `rope_scaling`."""


def longrope_attention_factor(factor: float, original_positions: int) -> float:
    """Return the usual factor of rotated queries and keys for a context extended by `factor`."""
    return sqrt(1 + log(factor) / log(original_positions)) if factor > 1 and original_positions > 1 else 1.0


def model_settings() -> dict[str, FieldInfo]:
    """Return the settings of the `model` section of all families, in order."""
    fields = dict(ModelConfig.model_fields)
    order = list(fields)
    for name in FAMILIES.names():
        kind = FAMILIES.load(name).config
        place = len(order)
        for added, field in kind.model_fields.items():
            if added in fields:
                continue
            if added in kind.comes_after:
                place = order.index(kind.comes_after[added]) + 1
            fields[added] = field
            order.insert(place, added)
            place += 1
    return {name: fields[name] for name in order}
