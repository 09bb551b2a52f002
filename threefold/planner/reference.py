"""Reference of all settings, and of all features with the pairs that can be combined."""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from threefold.config.by_step import ByStep
from threefold.config.loading import config_of, parse_value
from threefold.config.model import FAMILIES
from threefold.config.presets import FAMILIES as PRESET_FAMILIES
from threefold.config.resolve import resolve
from threefold.config.schedules import SCHEDULES
from threefold.config.schema import Config, section_settings, section_types
from threefold.config.section import NameIn
from threefold.errors import UserError
from threefold.plugins import one_of

_FOLDER: Final = Path(__file__).parent
_SIGNS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
_TYPES: dict[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of configs; its `model` has the settings of every family."""
    document = Config.model_json_schema()
    model: dict[str, Any] = {}
    for name in FAMILIES.names():
        described = FAMILIES.load(name).config.model_json_schema()
        document["$defs"] |= described.get("$defs", {})
        for key, setting in described["properties"].items():
            known = model.setdefault(key, setting)
            if known.get("default") != setting.get("default"):
                known.pop("default", None)
    shared = document["$defs"]["ModelConfig"]["properties"]
    named = {**shared["architecture"], "examples": list(FAMILIES.names())}
    document["$defs"]["ModelConfig"]["properties"] = {**model, "architecture": named}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def markdown() -> str:
    """Return the whole page: an introduction, a table for each section, and the presets."""
    lines, settings = [_FOLDER.joinpath("reference.md").read_text(encoding="utf-8")], section_settings()
    for name, section in section_types().items():
        lines.append(f"## `{name}`\n\n{section.__doc__}\n\n| Setting | Value | Default | Meaning |\n|---|---|---|---|")
        for key, setting in settings[name].items():
            meaning, _, default = " ".join((setting.description or "").split()).partition(" Default: ")
            lines.append(f"| `{key}` | {_value(setting)} | {_default(setting, default)} | {meaning} |")
        lines.append("")
    return "\n".join([*lines, *_presets()])


def _value(field: FieldInfo) -> str:
    kind = field.annotation
    named = [rule.registry for rule in field.metadata if isinstance(rule, NameIn)]
    choices = get_args(kind) if get_origin(kind) is Literal else named[0].built_in if named else field.examples
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if get_origin(kind) in (Union, UnionType):
        return "text, or list of whole numbers"
    if get_origin(kind) is dict:
        return "names and values" if get_args(kind)[1] is Any else "paths and numbers > 0"
    if get_origin(kind) is list:
        return "list of names"
    if get_origin(kind) is tuple:
        return "list of names or mappings" if Ellipsis in get_args(kind) else "list of two numbers"
    limits = []
    for rule in field.metadata:
        if type(rule) in _SIGNS:
            sign, name = _SIGNS[type(rule)]
            limit = getattr(rule, name)
            power = len(str(limit)) - 1  # for a narrow column
            limits.append(f"{sign} {f'10^{power}' if power >= 5 and limit == 10**power else limit}")
    if any(isinstance(rule, ByStep) for rule in field.metadata):
        limits.append("or by step")
    return f"{_TYPES[kind]} {', '.join(limits)}".strip()


def _default(field: FieldInfo, described: str) -> str:
    if described:
        return described.rstrip(".")
    if field.is_required():
        return "must be given"
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    return f"`{field.default}`"


def _presets() -> Iterator[str]:
    yield "## Presets\n\nPublished models. Settings beside `model.preset` override the preset's, such as"
    yield "`--set model.vocab_size=N` for another tokenizer. `data.sequence_length` is `max_position_embeddings` unless"
    yield "set. `threefold config size` counts the parameters; [models.md](models.md) says what the families are.\n"
    for title, family in PRESET_FAMILIES.items():
        first, *rest = family.values()
        keys = list(dict.fromkeys(key for sizes in family.values() for key in sizes))
        same = [key for key in keys if all(key in sizes and sizes[key] == first.get(key) for sizes in rest)]
        keys = [key for key in keys if key not in same]
        common = ", ".join(f"`{key}` {_plain(first[key])}" for key in same)
        yield f"### {title}\n\nAll have {common}.\n"
        yield "| `model.preset` | " + " | ".join(f"`{key}`" for key in keys) + " |"
        yield "|---|" + "---:|" * len(keys)
        for name, sizes in family.items():
            yield f"| `{name}` | " + " | ".join(_plain(sizes[key]) if key in sizes else "" for key in keys) + " |"
        yield ""


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


Settings = dict[str, Any]  # `section.key` → value


@dataclass(frozen=True, eq=False)
class Feature:
    """Feature that can be switched on by settings, and its heading in the page."""

    name: str
    title: str
    group: str
    settings: Settings
    needs: Settings = field(default_factory=dict)  # at least; another feature may require larger ones
    part_of: tuple[str, ...] = ()  # other names in rules: its kind, and features that it needs

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.name, *self.part_of))

    def excludes(self, other: "Feature") -> bool:
        """Return whether both features are values of one setting, so that there is nothing to combine."""
        return any(self.settings[key] != other.settings[key] for key in self.settings.keys() & other.settings.keys())


def _overrides(text: str) -> Settings:
    return {key: parse_value(value, key) for key, _, value in (each.partition("=") for each in text.split())}


def _features() -> Iterator[Feature]:
    """Yield the features of the package's table, and after the axis `sp` the pipeline schedules, from their own."""
    rows = tomllib.loads(_FOLDER.joinpath("features.toml").read_text(encoding="utf-8"))
    for name, row in rows.items():
        settings, needs = _overrides(row["settings"]), _overrides(row.get("needs", ""))
        yield Feature(name, row["title"], row["group"], settings, needs, tuple(row.get("part_of", "").split()))
        for each in SCHEDULES.values() if name == "sp" else ():
            if each.name != "1f1b":
                count = next(count for count in (2, 4) if each.accepts(2, count))
                deferring = ("zero-bubble",) if each.defers_weight_gradients and each.name != "zero-bubble" else ()
                title, settings = f"pipeline schedule `{each.name}`", {"parallel.schedule": each.name}
                needs = {"parallel.pp": 2, "train.gradient_accumulation_steps": count}
                yield Feature(each.name, title, "Pipeline schedules", settings, needs, ("pp", *deferring))


FEATURES: tuple[Feature, ...] = tuple(_features())
_BASE: dict[str, Settings] = {
    "data": {"path": "tokens", "sequence_length": 8},
    "model": {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 24,
        "vocab_size": 37,
        "max_position_embeddings": 9,
        "initializer_range": 0.1,
        "tie_embeddings": False,
    },
    "train": {"global_batch_size": 16, "gradient_accumulation_steps": 1, "device": "cpu", "seed": 3},
    "precision": {"dtype": "fp64"},
    "optimizer": {"warmup_steps": 0, "lr": 3e-3, "eps": 1e-5},
}
"""A small model without any feature."""


def config_with(features: Iterable[Feature], further: Settings | None = None) -> Config:
    """Return a small resolved config with these features and `further` settings; raise a `UserError` if impossible."""
    chosen = tuple(features)
    settings: Settings = {}
    for feature in chosen:
        for key, value in feature.needs.items():
            settings[key] = max(value, settings.get(key, value))
    for feature in chosen:
        for key, value in feature.settings.items():
            counts = isinstance(value, int) and not isinstance(value, bool) and key != "parallel.zero"
            settings[key] = max(value, settings.get(key, value)) if counts else value
    return resolve(config_of(_BASE, {**settings, **(further or {})}), vocab_size=1)


def features_named(names: Sequence[str]) -> list[Feature]:
    """Return the features with these names; raise a `UserError` for an unknown name."""
    known = {feature.name: feature for feature in FEATURES}
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is not a feature but must be {one_of(name, list(known))}.")
    return [known[name] for name in names]


def answers(features: Sequence[Feature]) -> Iterator[str]:
    """Yield sentences on which features a single one cannot be combined with, or on whether several can be combined."""
    if len(features) == 1:
        (feature,) = features
        others = (other for other in FEATURES if other is not feature and not feature.excludes(other))
        refused = [(other, reason) for other in others if (reason := _obstacle((feature, other)))]
        if not refused:
            yield f"{feature.name} ({feature.title}) goes together with all other features."
        yield from (f"not with {other.name}: {reason}" for other, reason in refused)
        return
    broken = 0
    for first, second in combinations(features, 2):
        if reason := _obstacle((first, second)):
            broken += 1
            yield f"{first.name} and {second.name} cannot be combined: {reason}"
    if not broken:
        reason = _obstacle(features)
        together = " and ".join(feature.name for feature in features)
        yield f"{together} cannot be combined: {reason}" if reason else f"{together} can be combined."


def _obstacle(features: Sequence[Feature]) -> str:
    for first, second in combinations(features, 2):
        if first.excludes(second):
            key = next(key for key in first.settings if first.settings[key] != second.settings.get(key))
            return f"both are values of {key}; choose one."
    try:
        config_with(features)
    except UserError as error:
        return str(error)
    return ""
