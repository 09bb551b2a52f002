"""YAML of a config: plain values, and the line of each setting.

Configs may come from untrusted sources. Anything beyond plain values is refused with a one-sentence error: tags that
name types, values that contain themselves, and aliases or nesting that grow without bound.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from threefold.errors import UserError
from threefold.files import read_text, shown

LARGEST_DOCUMENT: Final = 256 << 10
"""Size limit of a config in bytes; a config that sets everything has less than 10 KiB."""
MOST_VALUES: Final = 20_000
"""Limit on the keys and values of a document, with aliases expanded."""
_TOO_MANY: Final = f"it holds more than {MOST_VALUES:,} values, with aliases (*) expanded"
_DEEPEST: Final = 20
_LONGEST_NUMBER: Final = 400
"""Limit on the characters of a number; the largest double has 309 digits."""
_PREFIX: Final = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the numbers of YAML 1.2: 1e-3 is a number, nothing is a date or base 60, and `=` is text."""

    _depth = _count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node like the base class, within bounds on depth and size that keep stack and time finite."""
        if self._depth > _DEEPEST:
            raise RecursionError
        if self._count > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, _TOO_MANY, parent.start_mark if parent else None)
        self._depth, self._count = self._depth + 1, self._count + 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_FLOAT = r"^[-+]?(?:(?:[0-9][0-9_]*)?\.?[0-9][0-9_]*\.?(?:[eE][-+]?[0-9]+)?|\.inf|\.nan)$"
"""Numbers of YAML 1.2; tried after whole numbers."""
_INT = r"^[-+]?(?:0|[1-9][0-9_]*)$"


_NO_NUMBERS: Final = {f"{_PREFIX}{name}" for name in ("float", "int", "timestamp", "value")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in _NO_NUMBERS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_PREFIX}int", re.compile(_INT), list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_PREFIX}float", re.compile(_FLOAT), list("-+.0123456789"))


def parse_value(text: str, where: str) -> Any:
    """Parse the value of an override; raise a `UserError` if it is not YAML, or more than plain values."""
    if len(text) > LARGEST_DOCUMENT:
        raise UserError(f"{where}: its value has {len(text):,} characters and {LARGEST_DOCUMENT:,} are allowed.")
    return _parse(text, where)[0]


def read_document(path: Path, called: str = "the config ") -> tuple[Any, dict[tuple[str, ...], int]]:
    """Read the values of a YAML file, and the line (from 1) of each key by its path of names.

    Args:
        path: path of the file.
        called: description of the file for error messages, written before its path.

    Raises:
        UserError: the file cannot be read, is not YAML, holds more than plain values, or sets a key twice.
    """
    value, keys = _parse(read_text(path, called, LARGEST_DOCUMENT), shown(path))
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
        _require_plain_tag(loader, node, at)
        if isinstance(node, yaml.MappingNode):
            total = 1 + sum(size(key) + size(value) for key, value in node.value)
        else:
            total = 1 + (sum(map(size, node.value)) if isinstance(node, yaml.SequenceNode) else 0)
        if total > MOST_VALUES:
            raise UserError(f"{at}: {_TOO_MANY}.")
        sizes[node] = total
        return total

    size(node)


def _require_plain_tag(loader: _Loader, node: yaml.Node, at: str) -> None:
    natural = f"{_PREFIX}map" if isinstance(node, yaml.MappingNode) else f"{_PREFIX}seq"
    if isinstance(node, yaml.ScalarNode):
        natural = loader.resolve(yaml.ScalarNode, node.value, (node.style is None, node.style is not None))
        if node.tag == f"{_PREFIX}str":
            natural = node.tag
        if node.tag != f"{_PREFIX}str" and len(node.value) > _LONGEST_NUMBER:
            raise UserError(f"{at}: {shown(node.value)} is too long for a number.")
    if node.tag != natural:
        tag = shown(node.tag.replace(_PREFIX, "!!"))
        raise UserError(f"{at}: the tag {tag} is not allowed in a config; write a plain value.")


def _keys(node: yaml.Node, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = (*prefix, str(key.value))
            yield name, key.start_mark.line + 1
            yield from _keys(value, name)
