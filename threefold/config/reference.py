"""Reference of all settings as Markdown, generated from the schema."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from threefold.config.presets import FAMILIES as PRESET_FAMILIES
from threefold.config.schema import section_settings, section_types
from threefold.config.section import NameIn

_INTRODUCTION = """\
# The settings of a run

<!-- Written by `make docs` from threefold/config/schema.py; edit the docstrings there. -->

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
one sentence that names the line and the nearest value that works, before any worker starts.

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


def markdown() -> str:
    """Return the whole page: an introduction, a table for each section, the presets."""
    return "\n".join([_INTRODUCTION, *_sections(), *_presets()])


def _sections() -> Iterator[str]:
    settings = section_settings()
    for name, section in section_types().items():
        yield f"## `{name}`\n\n{section.__doc__}\n\n| Setting | Value | Default | Meaning |\n|---|---|---|---|"
        for key, field in settings[name].items():
            meaning, _, default = " ".join((field.description or "").split()).partition(" Default: ")
            yield f"| `{key}` | {_value(field)} | {_default(field, default)} | {meaning} |"
        yield ""


def _value(field: FieldInfo) -> str:
    kind = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    named = [rule.registry for rule in field.metadata if isinstance(rule, NameIn)]
    if named:
        return ", ".join(f"`{choice}`" for choice in named[0].built_in)
    if field.examples:
        return ", ".join(f"`{choice}`" for choice in field.examples)
    if get_origin(kind) in (Union, UnionType):
        return "text, or list of whole numbers"
    if get_origin(kind) is dict:
        return "names and values" if get_args(kind)[1] is Any else "paths and numbers > 0"
    if get_origin(kind) is tuple:
        return "list of names or mappings" if Ellipsis in get_args(kind) else "list of two numbers"
    signs = [(*_SIGNS[type(rule)], rule) for rule in field.metadata if type(rule) in _SIGNS]
    limits = ", ".join(f"{sign} {_limit(getattr(rule, name))}" for sign, name, rule in signs)
    return f"{_TYPES[kind]} {limits}".strip()


def _limit(number: float) -> str:
    """Format a limit for a narrow column, with powers of ten as such."""
    power = len(str(number)) - 1
    return f"10^{power}" if power >= 5 and number == 10**power else str(number)


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
        yield from _preset_table(title, family)


def _preset_table(title: str, family: dict[str, dict[str, Any]]) -> Iterator[str]:
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
