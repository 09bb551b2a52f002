"""How a model's Python file is named: `FILE.py`, or `FILE.py:NAME`."""

import ast
from collections.abc import Callable, Iterator
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from threefold.config.presets import PRESETS, PresetName
from threefold.config.section import MOST_IDS, MOST_TOKENS, NameIn, Section, derived, nearest_divisor
from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import Registry


def split_model_file(text: str, setting: str = "--model") -> tuple[Path, str]:
    """The file, and the name in it, which may be empty.

    Args:
        text: as given.
        setting: what it was given as.

    Raises:
        UserError: there is no such file.
    """
    file, _, name = text.partition(":")
    if not Path(file).is_file():
        raise UserError(
            f"{setting} is {shown(text)} but {shown(file)} is not a file; name a Python file, as in model.py:MyModel."
        )
    return Path(file).resolve(), name


def is_made_from_section(file: Path, name: str) -> bool:
    """Whether a file's function `make_model` makes the model from the `model` section of the config, of whatever
    architecture it is, and not a class or function of that name.

    Args:
        file: is read and not executed; it may be no valid Python.
        name: in it, which may be empty.
    """
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):  # importing it says what is wrong
        return False
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return "make_model" in functions and not any(isinstance(node, ast.ClassDef) and node.name == name for node in body)


RopeMethod = Literal["none", "linear", "dynamic", "llama3", "yarn"]

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
_RAMPS: Final = (("rope_low_frequency_factor", "rope_high_frequency_factor"), ("rope_beta_slow", "rope_beta_fast"))
"""Where frequencies begin to be divided less, and where they stay: turns in the original positions."""
MOST_LAYERS: Final = 1024
MOST_HEADS: Final = 2**16
WIDEST: Final = 2**20
WIDEST_FFN: Final = 2**24

OWN: Final = "own"
"""The family of models of a user's own file or program."""

FAMILIES: Final = Registry(
    "model.architecture",
    "threefold.model_families",
    {
        "gpt": "threefold.models.gpt:FAMILY",
        "llama": "threefold.models.llama:FAMILY",
        "own": "threefold.models.own:FAMILY",
    },
)
"""The families of models, each a `threefold.models.family.Family`; its `config` is the class of its `model` section."""

if TYPE_CHECKING:
    unless_setting = property
else:

    class unless_setting:
        """A property that a derived class may declare as a setting instead.

        A field's value is in the instance's own `__dict__`, which Python searches before a descriptor without
        `__set__`; and as the class itself has no such attribute, pydantic finds no field that shadows one.
        """

        def __init__(self, value: Callable[[Any], Any]) -> None:
            self._value = value

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                raise AttributeError
            return self._value(instance)


class ModelConfig(Section):
    """The network: a decoder in the style of GPT-2, or of Llama and those that followed it."""

    model_config = ConfigDict(ignored_types=(unless_setting,))

    preset: PresetName = derived()
    """A published model whose sizes are taken; settings given beside it override the preset's."""
    architecture: Annotated[str, NameIn(FAMILIES)] = "gpt"
    """The family: `gpt` (layer norms, biases, GELU), or `llama` (root-mean-square norms, rotary positions, SwiGLU), of
    which Qwen, Mistral and, with `num_experts`, Mixtral are kinds; or `own`, the model of `file`."""
    num_layers: int = Field(default=8, ge=1, le=MOST_LAYERS)
    """Transformer blocks."""
    hidden_size: int = Field(default=256, ge=1, le=WIDEST)
    """Width of the residual stream; for `gpt` a multiple of `num_attention_heads`."""
    num_attention_heads: int = Field(default=8, ge=1, le=MOST_HEADS)
    """Attention heads in each block; a multiple of `parallel.tp`."""
    ffn_hidden_size: int = derived(ge=1, le=WIDEST_FFN)
    """Width inside the feed-forward network; a multiple of `parallel.tp`. Default: 4 · `hidden_size` for `gpt`; 8/3 of
    it, up to a multiple of 16, for `llama`."""
    vocab_size: int = derived(ge=1, le=MOST_IDS)
    """Rows of the embedding; at least the tokenizer's vocabulary, divisible by `parallel.tp` or not. Default: the
    tokenizer's vocabulary (a preset's: the published one)."""
    max_position_embeddings: int = derived(ge=1, le=MOST_TOKENS)
    """Longest sequence the model can read. Default: `data.sequence_length`."""
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an element of the embeddings (of `gpt`: unless `embedding_dropout` is given) and of what
    each block adds to the residual stream."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an attention weight."""
    position_embedding: Literal["learned", "rope"] = derived()
    """How positions are encoded: `learned`, a vector for each position, or `rope` (rotary position embedding), which
    rotates queries and keys; the width of a head is even for it. `llama` has `rope`. Default:
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
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    tie_embeddings: bool = derived()
    """Whether the output head shares the token embedding's weight. Default: `true` for `gpt`, `false` for `llama`."""

    comes_after: ClassVar[dict[str, str]] = {}
    """Own setting → the common one after which a config lists it and those declared below it; else at the end."""

    _of_others: dict[str, "ModelConfig"] = PrivateAttr(default_factory=dict)
    """Given settings that other families have and this one lacks, each with a config that holds it."""

    # Properties of every model, with their values where a family does not have the setting.

    @unless_setting
    def num_key_value_heads(self) -> int:
        """Heads of keys and values; fewer than those of the queries in grouped-query attention (GQA)."""
        return self.num_attention_heads

    @unless_setting
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    @unless_setting
    def embedding_dropout(self) -> float:
        """Probability of dropping an element of the embeddings."""
        return self.hidden_dropout

    @unless_setting
    def activation(self) -> str:
        """The activation function of a feed-forward network that is not gated."""
        return "gelu_tanh"

    @unless_setting
    def qk_norm(self) -> bool:
        """Whether there is QK-norm: a norm of each head's queries and keys."""
        return False

    @unless_setting
    def sliding_window(self) -> int:
        """Positions that a token attends to; 0 for all."""
        return 0

    @unless_setting
    def full_attention_layers(self) -> int:
        """Layers at the start without a sliding window."""
        return 0

    @unless_setting
    def num_experts(self) -> int:
        """Experts of a layer; 0 for none."""
        return 0

    @unless_setting
    def experts_per_token(self) -> int:
        """Experts that are active per token."""
        return 0

    @unless_setting
    def expert_ffn_hidden_size(self) -> int:
        """Width inside an expert."""
        return 0

    @unless_setting
    def shared_expert_ffn_hidden_size(self) -> int:
        """Width inside the shared expert; 0 for none."""
        return 0

    @unless_setting
    def moe_every(self) -> int:
        """Every so many-th layer has experts."""
        return 1

    @unless_setting
    def dense_layers(self) -> int:
        """Layers at the start without experts."""
        return 0

    @unless_setting
    def file(self) -> str:
        """The Python file of an own model; empty where there is none."""
        return ""

    @unless_setting
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of an own model's constructor."""
        return {}

    @property
    def blocks(self) -> int | None:
        """How many blocks there are; None where the config does not say."""
        return self.num_layers

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, from 0, has experts."""
        return self.num_experts > 0 and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    def window(self, layer: int) -> int:
        """How many positions back the tokens of a layer attend; 0 for all."""
        return self.sliding_window if layer >= self.full_attention_layers else 0

    # Defaults that a family may override.

    def filled(self, sequence_length: int) -> dict[str, Any]:
        """Values of the settings that follow from others."""
        positions = self.max_position_embeddings or sequence_length
        return {
            "ffn_hidden_size": self.default_ffn_hidden_size(),
            "max_position_embeddings": positions,
            "position_embedding": "learned",
            "rope_original_positions": positions,
            "rope_attention_factor": 0.1 * log(self.rope_factor) + 1 if self.rope_scaling == "yarn" else 1.0,
            "tie_embeddings": True,
        }

    def default_ffn_hidden_size(self) -> int:
        """Width inside the feed-forward network where it is not given."""
        return 4 * self.hidden_size

    def unused(self) -> Iterator[tuple[str, str]]:
        """Settings without effect, given the values of others; each with the rule against setting it."""
        if self.rope_scaling == "none":
            for name in FOR_SCALED_ROPE:
                yield name, "model.rope_scaling is none; use rope_scaling linear or leave it out"

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Settings of a resolved config that break a rule of the family; each with the rule, as it follows 'but'."""
        yield from self.broken_by_setting_unused()
        yield from self.broken_by_heads()
        if self.position_embedding == "rope" and self.head_dim % 2:
            rule = "the width of a head, model.hidden_size / model.num_attention_heads"
            nearest = (self.head_dim + 1) * self.num_attention_heads
            yield (
                "position_embedding",
                f"{rule} = {self.head_dim}, must be even for it; use model.hidden_size {nearest}, or learned",
            )
        yield from self.broken_by_rope()

    # Parts of these rules, for a family to choose from.

    def broken_by_setting_unused(self) -> Iterator[tuple[str, str]]:
        """A setting without effect is an error, unless it has its default value."""
        for name in self.setting_names():
            if (other := self._of_others.get(name)) and not other.is_as_unset(name):
                rule = f"model.architecture is {self.architecture}, which has no such thing"
                rule += f"; use architecture {other.architecture} or leave it out"
                yield name, dict(other.unused()).get(name, rule)
        yield from ((name, rule) for name, rule in self.unused() if not self.is_as_unset(name))

    def broken_by_heads(self) -> Iterator[tuple[str, str]]:
        if self.hidden_size % self.num_attention_heads:
            nearest = nearest_divisor(self.num_attention_heads, self.hidden_size)
            yield "num_attention_heads", f"must divide model.hidden_size {self.hidden_size}; use {nearest}"

    def broken_by_rope(self) -> Iterator[tuple[str, str]]:
        if self.rope_scaling != "none" and self.position_embedding != "rope":
            yield "rope_scaling", "model.position_embedding is learned; use none, or rope"
        if self.rope_scaling == "dynamic" and self.head_dim == 2:
            yield "rope_scaling", "heads of width 2 turn alike whatever the base; use linear"
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:
            yield "rope_theta", "must be above 1 for model.rope_scaling yarn; use 10000"
        for low, high in _RAMPS:
            end = getattr(self, high)
            if getattr(self, low) >= end:
                yield low, f"must be below model.{high} {end:g}; use {end / 4:g}"

    # How a section is read and written.

    @model_validator(mode="wrap")
    @classmethod
    def _read_as_family(cls, given: Any, read: Callable[[Any], "ModelConfig"]) -> "ModelConfig":
        """The class of the family in place of the base; settings of other families set aside for `broken_rules`."""
        if not isinstance(given, dict):
            return read(given)
        preset = given.get("preset")
        given = {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **given}
        if cls is ModelConfig:
            name = given.get("architecture")
            if name is None:
                name = OWN if given.get("file") else cls.model_fields["architecture"].default
            if isinstance(name, str) and name in FAMILIES:
                return FAMILIES.load(name).config.model_validate(given)
        foreign = {name: kind for name in given if name not in cls.model_fields and (kind := _class_with(name))}
        config = read({name: value for name, value in given.items() if name not in foreign})
        for kind in dict.fromkeys(foreign.values()):
            common = {name: getattr(config, name) for name in ModelConfig.model_fields if name != "architecture"}
            others = {name: given[name] for name in foreign if foreign[name] is kind}
            other = kind.model_validate({**common, **others})
            config._of_others.update(dict.fromkeys((name for name in others if given[name] is not None), other))
        return config

    @classmethod
    def setting_names(cls) -> list[str]:
        """The settings of all families in the order in which a config has them."""
        return list(model_settings())

    def value_of(self, name: str) -> Any:
        """A setting as given, whether or not this family has it."""
        return getattr(self._of_others.get(name, self), name)

    def is_as_unset(self, name: str) -> bool:
        """Whether a setting has its default value."""
        unset = self.filled(self.max_position_embeddings or 0).get(name, type(self).model_fields[name].default)
        return bool(getattr(self, name) == unset)

    def settings(self) -> dict[str, Any]:
        """The settings that have a value, without those that mean nothing in this family and are as they were."""
        idle = {name for name, _ in self.unused() if self.is_as_unset(name)}
        values = {name: value for name, value in super().settings().items() if name not in idle}
        if not values.keys() - ModelConfig.model_fields.keys() and not self._of_others:
            return values
        values |= {name: getattr(other, name) for name, other in self._of_others.items() if not other.is_as_unset(name)}
        return {name: values[name] for name in self.setting_names() if name in values}


def model_settings() -> dict[str, FieldInfo]:
    """Every setting of the section, of whatever family, in order."""
    fields = dict(ModelConfig.model_fields)
    order = list(fields)
    for name in FAMILIES.names():
        kind = FAMILIES.load(name).config
        place = len(order)
        for own, field in kind.model_fields.items():
            if own in fields:
                continue
            if own in kind.comes_after:
                place = order.index(kind.comes_after[own]) + 1
            fields[own] = field
            order.insert(place, own)
            place += 1
    return {name: fields[name] for name in order}


def _class_with(setting: Any) -> type[ModelConfig] | None:
    """The class of the first family that has a setting; None where none has."""
    kinds: Iterator[type[ModelConfig]] = (FAMILIES.load(name).config for name in FAMILIES.names())
    return next((kind for kind in kinds if setting in kind.model_fields), None)
