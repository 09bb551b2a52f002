"""Reference of all settings, and of all features with the pairs that can be combined."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from threefold.config.loading import config_of, parse_value
from threefold.config.model import FAMILIES
from threefold.config.presets import FAMILIES as PRESET_FAMILIES
from threefold.config.resolve import resolve
from threefold.config.schedules import SCHEDULES
from threefold.config.schema import Config, section_settings, section_types
from threefold.config.section import NameIn
from threefold.errors import UserError
from threefold.plugins import one_of

_INTRODUCTION = """\
# The settings of a run

A config is a YAML file of sections. Only `data.path`, or `data.mixture` in its place, must be given:

```yaml
data:
  path: tokens          # a folder that `threefold data prepare` wrote
parallel: {dp: 2, tp: 2, pp: 2}
train: {max_steps: 300, eval_every: 50}
```

`threefold train CONFIG --set section.key=value` overrides single settings, as YAML: `--set optimizer.betas=[0.9,0.99]`;
`null` stands for the default. `threefold config show CONFIG` prints the config with every setting filled, as it is
stored in `RUN/config.yaml`, and changes nothing. What was derived from other settings, from the layout or from the data
is a comment there, and is derived again when the file is used with a change: in another layout (`threefold train
RUN/config.yaml --run-dir RUN --resume --set parallel.dp=4`), or for more steps (`--set train.max_steps=2000`, which
`optimizer.decay_steps` follows). A misspelt key, a wrong type or settings that cannot go together end the command with
one sentence that names the line and the nearest value that works, before any worker starts. An editor with a YAML
language server completes and checks settings with `threefold config schema > schema.json` and, in the file's first
line, `# yaml-language-server: $schema=schema.json`. `threefold config diff A B` lists the settings in which two files,
or the folders of two runs, differ.

The layout (`parallel`) is a performance choice: whatever it is, the same config trains the same model. So the global
batch size never follows from `parallel.dp`: with nothing given it is 32, and a `dp` that does not divide it is refused.

| Given | Derived |
|---|---|
| `global_batch_size`, `micro_batch_size` | `gradient_accumulation_steps` = global / (micro · dp) |
| `global_batch_size`, `gradient_accumulation_steps` | `micro_batch_size` = global / (accumulation · dp) |
| `micro_batch_size`, `gradient_accumulation_steps` | `global_batch_size` = micro · accumulation · dp |
"""

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
    lines, settings = [_INTRODUCTION], section_settings()
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
    if get_origin(kind) is tuple:
        return "list of names or mappings" if Ellipsis in get_args(kind) else "list of two numbers"
    limits = []
    for rule in field.metadata:
        if type(rule) in _SIGNS:
            sign, name = _SIGNS[type(rule)]
            limit = getattr(rule, name)
            power = len(str(limit)) - 1  # for a narrow column
            limits.append(f"{sign} {f'10^{power}' if power >= 5 and limit == 10**power else limit}")
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


def _schedules() -> Iterator[tuple[str, ...]]:
    for row in SCHEDULES.values():
        if row.name != "1f1b":
            count = next(count for count in (2, 4) if row.accepts(2, count))
            needs = f"parallel.pp=2 train.gradient_accumulation_steps={count}"
            deferring = " zero-bubble" * (row.defers_weight_gradients and row.name != "zero-bubble")
            title, chosen = f"pipeline schedule `{row.name}`", f"parallel.schedule={row.name}"
            yield "Pipeline schedules", row.name, title, chosen, needs, f"pp{deferring}"


_OF_EXPERTS = (
    "model.architecture=llama model.expert_capacity_factor=1.0 model.router_aux_loss=0.1 model.router_z_loss=0.1"
)
_OF_ZERO = ("parallel.dp=2", "dp zero")
_OF_LLAMA = "model.num_key_value_heads=2 model.sliding_window=5 model.qk_norm=true"
_ROWS: tuple[tuple[str, ...], ...] = (
    # group, name, title, settings and needs in the form of overrides (section.key=value), part of
    ("Axes", "dp", "data parallelism", "parallel.dp=2"),
    ("Axes", "tp", "tensor parallelism", "parallel.tp=2"),
    ("Axes", "pp", "pipeline parallelism, schedule `1f1b`", "parallel.pp=2"),
    ("Axes", "cp", "context parallelism, keys and values gathered", "parallel.cp_method=all-gather", "parallel.cp=2"),
    ("Axes", "ring", "context parallelism as a ring", "parallel.cp_method=ring", "parallel.cp=2", "cp"),
    ("Axes", "sp", "sequence parallelism", "parallel.sequence_parallel=true", "parallel.tp=2", "tp"),
    *_schedules(),
    *(
        ("ZeRO", f"zero{n}", f"ZeRO stage {n}: optimizer states{what} shared", f"parallel.zero={n}", *_OF_ZERO)
        for n, what in ((1, ""), (2, " and gradients"), (3, ", gradients and weights"))
    ),
    (
        *("ZeRO", "hybrid", "ZeRO among some of the replicas"),
        *("parallel.zero_shards=2", "parallel.dp=4 parallel.zero=1", "dp zero"),
    ),
    (
        *("Memory", "selective", "attention computed again in the backward pass"),
        *("train.recompute=selective", "", "recompute"),
    ),
    ("Memory", "full", "blocks computed again in the backward pass", "train.recompute=full", "", "recompute"),
    ("Memory", "chunked", "the logits some columns at a time", "train.loss_chunk_size=5"),
    ("Precision", "bf16", "bf16 with fp32 masters", "precision.dtype=bf16 precision.master_weights=true"),
    ("Precision", "fp16", "fp16 with a loss scale and fp32 masters", "precision.dtype=fp16"),
    ("Precision", "pure-bf16", "bf16 without fp32 masters", "precision.dtype=bf16 precision.master_weights=false"),
    ("Precision", "fp8", "linear layers in float8", "precision.fp8=true", "precision.dtype=bf16"),
    (
        *("Precision", "compressed", "gradients summed in 16 bits", "parallel.gradient_compression=fp16"),
        *("parallel.dp=2 precision.dtype=fp32", "dp compression"),
    ),
    ("Compilation and accumulation", "compile", "compiled layers", "train.compile=true"),
    ("Model", "tied", "tied embeddings", "model.tie_embeddings=true"),
    ("Model", "documents", "attention that stops at documents", "data.separate_documents=true"),
    ("Model", "rope", "rotary positions", "model.position_embedding=rope"),
    ("Model", "llama", "GQA, QK-norm, a sliding window, SwiGLU", "model.architecture=llama", _OF_LLAMA),
    ("Model", "experts", "a mixture of experts with a capacity and its losses", "model.num_experts=4", _OF_EXPERTS),
    (
        *("Axes", "ep", "experts shared among replicas", "parallel.ep=2"),
        *("parallel.dp=2 model.num_experts=4 model.architecture=llama", "dp experts"),
    ),
    ("Model", "dropout", "dropout", "model.hidden_dropout=0.1 model.attention_dropout=0.1"),
    (
        *("Compilation and accumulation", "accumulation", "several micro-batches a step"),
        "train.gradient_accumulation_steps=2",
    ),
)


def _feature(group: str, name: str, title: str, settings: str, needs: str = "", part_of: str = "") -> Feature:
    given, least = (
        {key: parse_value(value, key) for key, _, value in (each.partition("=") for each in text.split())}
        for text in (settings, needs)
    )
    return Feature(name, title, group, given, least, tuple(part_of.split()))


FEATURES: tuple[Feature, ...] = tuple(_feature(*row) for row in _ROWS)
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
