"""Loading of a config from YAML and overrides, with one-sentence errors that suggest the nearest valid setting.

Configs may come from untrusted sources. Anything beyond plain values is refused with a one-sentence error: tags that
name types, values that contain themselves, and aliases or nesting that grow without bound.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from threefold.config.schema import Config, section_settings
from threefold.doors import added, imported
from threefold.errors import UserError
from threefold.files import hide_secrets, read_text, shown
from threefold.foreign import FolderFiles
from threefold.plugins import one_of

_UNSET = object()


def problem(config: Config, key: str, rule: str, value: Any = _UNSET) -> UserError:
    """Build the error for a setting `section.name` that breaks a rule.

    The rule, with the nearest value that works, follows 'but' in the sentence. `value` is a default that `config`,
    which knows the line that set the setting, does not hold yet.
    """
    section, name = key.split(".")
    value = getattr(getattr(config, section), name) if value is _UNSET else value
    text = str(list(value) if isinstance(value, tuple) else value)
    text = shown(text.lower() if isinstance(value, bool) else text)
    return UserError(f"{config.origin(key)}{key} is {text} but {rule}.")


def nearest_setting(key: str, known: Sequence[str], sections: Sequence[str]) -> str:
    """Return the setting most likely meant by an unknown key; a section if the name of a section was misspelt."""
    section, _, name = key.rpartition(".")
    if section not in sections:
        close = get_close_matches(section or name, sections, n=1)
        if close and not section:
            return close[0]
        section = close[0] if close else section
    names = {key: key.split(".")[1] for key in known}
    tables = map(imported, added("SETTING_NAMES").values())
    elsewhere = ((ours, theirs) for table in tables for ours, theirs in table.items())
    meant = next((ours for ours, theirs in elsewhere if name.lower() in theirs.split()), name)
    of_section = [key for key in known if key.startswith(f"{section}.")]
    if same := [key for key in known if names[key] == meant]:
        return next((key for key in same if key in of_section), same[0])
    if inside := get_close_matches(f"{section}.{name}", of_section, n=1):
        return inside[0]
    anywhere = get_close_matches(name, names.values(), n=1, cutoff=0)
    return next(key for key in known if names[key] == anywhere[0])


Overrides = Iterable[str] | Mapping[str, Any]
"""Settings as `section.key=value` with the value in YAML, or a mapping from `section.key` to values."""


def load_config(path: Path | str, overrides: Overrides = ()) -> Config:
    """Read a config from a YAML file and apply overrides in order.

    Args:
        path: path of the YAML file.
        overrides: a mapping from settings to values, such as `{"parallel.tp": 2}`; or settings in the form
            `section.key=value`, the value as in YAML, such as `parallel.tp=2`.

    Returns:
        the config, with its sections as attributes.

    Raises:
        UserError: unreadable file, bad YAML, unknown key, wrong type or impossible value.

    Example:
        >>> config = threefold.load_config("my.yaml", {"parallel.tp": 2, "train.max_steps": 100})
        >>> config.parallel.tp
        2
    """
    return _load(path, overrides, read_document(Path(path)))


def load_stored_config(path: Path, overrides: Overrides = ()) -> Config:
    """Read the config that a run has stored, as `load_config`, without secrets that somebody may have put there."""
    return _load(path, overrides, _document(stored_text(path), path))


def stored_text(path: Path) -> str:
    """Return the text of a config in a folder that anyone may have made, without secrets."""
    return hide_secrets(FolderFiles(path.parent).text(path.name, "the config ", LARGEST_DOCUMENT))


def _load(path: Path | str, overrides: Overrides, document: tuple[Any, dict[tuple[str, ...], int]]) -> Config:
    read, lines = document
    read = {} if read is None else read
    if not isinstance(read, dict):
        raise UserError(f"{shown(path)}: a config is a mapping of sections such as data: and model:.")
    values = {name: {} if section is None else _named(section) for name, section in _named(read).items()}
    origins = {".".join(key): f"{shown(path)}, line {line}: " for key, line in lines.items()}
    return config_of(values, overrides, origins, places=origins, where=shown(path))


def differing_settings(configs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, tuple[Any, ...]]:
    """Return the settings in which configs differ, as `section.key`, with the value in each; None where not set."""
    keys = dict.fromkeys((name, key) for sections in configs for name, values in sections.items() for key in values)
    found = {f"{name}.{key}": tuple(each.get(name, {}).get(key) for each in configs) for name, key in keys}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def config_of(
    sections: Mapping[str, Mapping[str, Any]],
    overrides: Overrides = (),
    origins: Mapping[str, str] | None = None,
    derived: Collection[str] = (),
    places: dict[str, str] | None = None,
    where: str = "config",
) -> Config:
    """Make a config from plain values by section; raise a `UserError` for an unknown key, or a wrong type or value.

    `origins` says where each setting was set before, for later errors; `derived` settings (`section.key`) follow from
    others. An error of this call begins with one of `places`, to which overrides add theirs, or with `where`.
    """
    values: dict[Any, Any] = {name: dict(one) if isinstance(one, Mapping) else one for name, one in sections.items()}
    if places is None:
        places = {f"{name}.{key}": "" for name, settings in sections.items() for key in settings}
    for key, value, place in _applied(overrides):
        section, name = key.split(".")
        places[key] = place
        chosen = values.setdefault(section, {})
        if isinstance(chosen, dict):
            chosen[name] = value
    try:
        return Config.model_validate(values, context=(origins or {}, frozenset(derived)))
    except ValidationError as error:
        raise UserError(_sentence(error, values, places, where)) from None


def _named(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {shown(key) if isinstance(key, str) else _shown(key): value for key, value in values.items()}


def _applied(overrides: Overrides) -> Iterator[tuple[str, Any, str]]:
    """Yield the setting, the value and the origin of each override; raise a `UserError` if it names no setting."""
    if isinstance(overrides, str):
        raise UserError(f"overrides is {shown(repr(overrides))} but must be a list or a mapping; use [{overrides!r}].")
    for override in overrides:
        if isinstance(overrides, Mapping):
            key, value, where, place = str(override), overrides[override], f"overrides has {shown(str(override))}", ""
        else:
            key, equals, text = override.partition("=")
            key, where = key.strip(), f"--set {shown(override)}"
            place = f"{where}: "
            if not equals or not key:
                raise UserError(f"{where}: write it as section.key=value.")
        if key in Config.model_fields:
            first = next(each for each in known_keys() if each.startswith(f"{key}."))
            raise UserError(f"{where}: {key} is a section; name a setting of it, such as {first}.")
        if key not in known_keys():
            raise UserError(f"{where}: {_unknown(key)}")
        yield key, value if isinstance(overrides, Mapping) else parse_value(text, where), place


def known_keys() -> list[str]:
    """Return every setting as `section.key`, in order."""
    return [f"{section}.{key}" for section, settings in section_settings().items() for key in settings]


def _sentence(error: ValidationError, values: dict[Any, Any], origins: dict[str, str], file: str) -> str:
    """Describe the first problem; unknown keys come first, because a misspelt key explains a missing one."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first: Any = problems[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    where = origins.get(key, f"{file}: ")
    if first["type"] == "extra_forbidden":
        return where + _unknown(key)
    if first["type"] == "missing" and key in ("data", "data.path"):
        return f"{where}data.path is missing; name the folder that `threefold data prepare` wrote."
    if first["type"] == "secret":  # the option itself may hold it
        where = f"--set {key}: " if where.startswith("--set") else where
        return f"{where}{key} has {first['ctx']['found']} but must be {first['ctx']['rule']}."
    if first["type"] == "given_twice":
        given = values["data"]
        return (
            f"{origins.get('data.mixture', where)}data.mixture is {_shown(given['mixture'])} but data.path is "
            f"{_shown(given['path'])} too; leave one of them out (--set data.path=null or --set data.mixture=null)."
        )
    if key == "data.mixture" and first["type"] == "local":
        return f"{where}{key} has {_shown(first['input'])} but each of its paths must be {_expected(first)}."
    if key == "data.mixture":
        rule = "must be paths and their weights, each above 0, such as {books: 3, code: 1}"
        given = values["data"]["mixture"]
        if isinstance(given, dict) and any(isinstance(weight, dict) for weight in given.values()):
            rule = "must be paths and their weights, or weights by step, such as {books: 3, code: {0: 0, 1000: 1}}"
        return f"{where}{key} is {_shown(values['data']['mixture'])} but {rule}."
    if first["type"] in ("model_type", "model_attributes_type", "dict_type") and len(first["loc"]) < 3:
        return f"{where}{key} is {_shown(first['input'])} but must be a section with settings below it."
    if first["type"] == "groups":
        return f"{where}{key} {first['ctx']['rule']}."
    if first["type"] == "group":
        name, number, problem = (first["ctx"][each] for each in ("key", "group", "problem"))
        expected = _OF_SEVERAL_KINDS.get(f"optimizer.{name}") or _expected(problem)
        return f"{where}{key} has {name} {_shown(problem['input'])} in group {number} but must be {expected}."
    if first["type"] == "by_step":
        entry = first["ctx"]
        rule = f"its entry {entry['step']}: {_shown(entry['value'])} must be {_expected(entry['problem'])}"
        return f"{where}{key} is {_shown(first['input'])} but {rule}."
    given = first["input"] if len(first["loc"]) < 3 else values[first["loc"][0]][first["loc"][1]]
    expected = _OF_SEVERAL_KINDS.get(key) or _expected(first)
    return f"{where}{key} is {_shown(given)} but must be {expected}."


def _unknown(key: str) -> str:
    nearest = nearest_setting(key[:100], known_keys(), list(Config.model_fields))  # comparing longer ones takes time
    return f"{shown(key)} is not a setting; the nearest is {nearest}."


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return shown(str(value).lower() if isinstance(value, bool) else repr(value))


_OF_SEVERAL_KINDS = {
    "model.attention_pattern": 'a list of full and sliding, or a period such as "5 sliding : 1 full"',
    **dict.fromkeys(("model.rope_short_factors", "model.rope_long_factors"), "a list of numbers above 0"),
    "optimizer.betas": "a list of two numbers",
    "optimizer.frozen": 'a list of patterns of names, such as [embed, "blocks.0"]',
    "optimizer.groups": 'a list of mappings such as {match: "**.bias", weight_decay: 0}',
    "data.key": "the name of a key, such as text",
    "data.split": 'weights of the training, validation and test parts, such as "949,50,1"',
    "parallel.fallbacks": 'a list of layouts, such as ["dp2,tp2", dp2]',
    "train.callbacks": "a list of names, import paths such as my_file.py:MyClass, or mappings such as {name: csv_log}",
    "parallel.partition": (
        "cost, uniform, uniform-chunks, class: and the name of a class, or a list of layers such as [3, 6]"
    ),
}
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list of two numbers",
    "finite": "a finite number",
    "too": "a list of two numbers",  # too long
    "missing": "a list of two numbers",  # too short
}


def _expected(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "literal_error":
        names = context["expected"].replace(" or ", ", ").split(", ")
        return one_of(problem["input"], [name.strip("'") for name in names])
    for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if kind.startswith(("greater_than", "less_than")) and name in context:
            limit, short = context[name], f"{context[name]:g}"
            return f"{words} {short if isinstance(limit, float) and float(short) == limit else limit}"
    if kind == "string_too_short":
        return "the name of a folder"
    if kind == "value_error":  # of a validator of this package
        return str(context["error"])
    given = problem["input"]
    if kind.startswith("int_") and isinstance(given, float) and given.is_integer():
        return f"a whole number; use {int(given)}"  # 1e3 is a number with a point to YAML
    return _EXPECTED.get(kind.split("_")[0], problem["msg"])


LARGEST_DOCUMENT: Final = 256 << 10
"""Size limit of a config in bytes; a config that sets everything is smaller than 10 KiB."""
MOST_VALUES: Final = 20_000  # limit on the keys and values of a document, with aliases expanded
_TOO_MANY: Final = f"it holds more than {MOST_VALUES:,} values, with aliases (*) expanded"
_PREFIX: Final = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the numbers of YAML 1.2: 1e-3 is a number, nothing is a date or base 60, and `=` is text."""

    _depth = _count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node like the base class, within bounds on depth and size that keep stack and time finite."""
        if self._depth > 20:
            raise RecursionError
        if self._count > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, _TOO_MANY, parent.start_mark if parent else None)
        self._depth, self._count = self._depth + 1, self._count + 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_NO_NUMBERS: Final = {f"{_PREFIX}{name}" for name in ("float", "int", "timestamp", "value")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in _NO_NUMBERS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"^[-+]?(?:(?:[0-9][0-9_]*)?\.?[0-9][0-9_]*\.?(?:[eE][-+]?[0-9]+)?|\.inf|\.nan)$"
_Loader.add_implicit_resolver(f"{_PREFIX}int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_PREFIX}float", re.compile(_FLOAT), list("-+.0123456789"))


def parse_value(text: str, where: str) -> Any:
    """Parse the value of an override; raise a `UserError` if it is not YAML, or more than plain values."""
    if len(text) > LARGEST_DOCUMENT:
        raise UserError(f"{where}: its value has {len(text):,} characters and {LARGEST_DOCUMENT:,} are allowed.")
    return _parse(text, where)[0]


def read_document(path: Path, called: str = "the config ") -> tuple[Any, dict[tuple[str, ...], int]]:
    """Read the values of a YAML file, and the line (from 1) of each key by its path of names.

    Raise a `UserError` that begins with `called` and the path if it cannot be read, is not YAML, holds more than plain
    values, or sets a key twice.
    """
    return _document(read_text(path, called, LARGEST_DOCUMENT), path)


def _document(text: str, path: Path | str) -> tuple[Any, dict[tuple[str, ...], int]]:
    value, keys = _parse(text, shown(path))
    lines: dict[tuple[str, ...], int] = {}
    for name, line in keys:
        if name in lines:
            key = shown(".".join(name))
            raise UserError(f"{shown(path)}, line {line}: {key} is set twice, first on line {lines[name]}.")
        lines[name] = line
    return value, lines


def _parse(text: str, where: str) -> tuple[Any, list[tuple[tuple[str, ...], int]]]:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        at, letter = f"{where}, line {text.count(chr(10), 0, error.position) + 1}", ord(text[error.position])
        raise UserError(f"{at}: not valid YAML, the character U+{letter:04X} is not allowed.") from None
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        _require_plain(loader, node, where)
        keys = list(_keys(node, ()))  # before merge keys are expanded
        return loader.construct_document(node), keys
    except RecursionError:
        raise UserError(f"{where}: its values are nested too deeply; a setting needs at most two levels.") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML, {shown(str(error.problem))}.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML, {shown(' '.join(str(error).split()))}.") from None
    finally:
        loader.dispose()


def _require_plain(loader: _Loader, node: yaml.Node, where: str) -> None:
    """Check that a document is text, numbers, true, false, null, lists and mappings of bounded size."""
    sizes: dict[yaml.Node, int | None] = {}

    def size(node: yaml.Node) -> int:
        at = f"{where}, line {node.start_mark.line + 1}"
        if node in sizes:
            known = sizes[node]
            if known is None:
                raise UserError(f"{at}: the value contains itself by an alias (*); write it without.")
            return known
        sizes[node] = None
        natural = f"{_PREFIX}map" if isinstance(node, yaml.MappingNode) else f"{_PREFIX}seq"
        if isinstance(node, yaml.ScalarNode):
            natural = loader.resolve(yaml.ScalarNode, node.value, (node.style is None, node.style is not None))
            if node.tag == f"{_PREFIX}str":
                natural = node.tag
            elif len(node.value) > 400:  # the largest double has 309 digits
                raise UserError(f"{at}: {shown(node.value)} is too long for a number.")
        if node.tag != natural:
            tag = shown(node.tag.replace(_PREFIX, "!!"))
            raise UserError(f"{at}: the tag {tag} is not allowed in a config; write a plain value.")
        if isinstance(node, yaml.MappingNode):
            total = 1 + sum(size(key) + size(value) for key, value in node.value)
        else:
            total = 1 + (sum(map(size, node.value)) if isinstance(node, yaml.SequenceNode) else 0)
        if total > MOST_VALUES:
            raise UserError(f"{at}: {_TOO_MANY}.")
        sizes[node] = total
        return total

    size(node)


def _keys(node: yaml.Node, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = (*prefix, str(key.value))
            yield name, key.start_mark.line + 1
            yield from _keys(value, name)
