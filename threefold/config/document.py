"""YAML as the config reads it: plain values, and the line each setting stands on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from threefold.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 but for numbers: 1e-3 is a number, and nothing is a date or counted in sixties."""


_FLOAT = r"^[-+]?(?:(?:[0-9][0-9_]*)?\.?[0-9][0-9_]*\.?(?:[eE][-+]?[0-9]+)?|\.inf|\.nan)$"
"""YAML 1.2's numbers; tried after whole numbers."""
_INT = r"^[-+]?(?:0|[1-9][0-9_]*)$"


def _set_number_rules() -> None:
    import re

    dropped = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in dropped]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INT), list("-+0123456789"))
    _Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+.0123456789"))


_set_number_rules()


def parse_value(text: str, where: str) -> Any:
    """The value of an override.

    Raises:
        UserError: `text` is not YAML.
    """
    return _parse(text, where)[0]


def read_text(path: Path, called: str = "") -> str:
    """The text of a file.

    Args:
        path: the file.
        called: what stands before its name in a sentence, with a space after it.

    Raises:
        UserError: it cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot read {called}{path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{called[:1].upper()}{called[1:]}{path} is not UTF-8 text (byte {error.start}).") from error


def read_document(path: Path) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Values of a YAML file, and the line (from 1) of each key by its path of names.

    Raises:
        UserError: the file cannot be read, is not YAML, or sets a key twice.
    """
    value, node = _parse(read_text(path, "the config "), str(path))
    lines: dict[tuple[str, ...], int] = {}
    for name, line in _keys(node, ()):
        if name in lines:
            raise UserError(f"{path}, line {line}: {'.'.join(name)} is set twice, first on line {lines[name]}.")
        lines[name] = line
    return value, lines


def _parse(text: str, where: str) -> tuple[Any, yaml.Node | None]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML, {error.problem}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML, {' '.join(str(error).split())}.") from error
    finally:
        loader.dispose()


def _keys(node: yaml.Node | None, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = (*prefix, str(key.value))
            yield name, key.start_mark.line + 1
            yield from _keys(value, name)
