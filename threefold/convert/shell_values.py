"""Values in foreign configs: constant Python expressions, and shell words with variables and arithmetic."""

import ast
import operator
import os.path
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any, Final, cast

from threefold.convert.shell_syntax import Lexer
from threefold.errors import UserError

_LARGEST = 10**18
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "min": min, "max": max, "round": round}


_MOST_PARTS = 10_000
"""Limit on the elements of a list or dict, including nested ones; a larger one stays source text."""


def parsed(text: str, expression: bool = False) -> ast.AST:
    """Parse foreign Python code, which may be invalid or too deeply nested, without Python's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval" if expression else "exec")


def constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate numbers, names, arithmetic, lists and `dict(…)`; anything else stays source text."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(node.operand, names)
        return -value if _is_number(value) else ast.unparse(node)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _binary(node, names)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = (key.value for key in node.keys if isinstance(key, ast.Constant))
        found = {str(key): constant(value, names) for key, value in zip(keys, node.values, strict=True)}
        return _bounded(found, node)
    if isinstance(node, ast.List | ast.Tuple):
        return _bounded([constant(part, names) for part in node.elts], node)
    if isinstance(node, ast.Subscript):
        return _part(constant(node.value, names), constant(node.slice, names), node)
    return _call(node, names) if isinstance(node, ast.Call) else ast.unparse(node)


def _call(node: ast.Call, names: Mapping[str, Any]) -> Any:
    function = node.func.id if isinstance(node.func, ast.Name) else ""
    keywords = {part.arg: part.value for part in node.keywords}
    if function == "dict" and not node.args and None not in keywords:
        return _bounded({str(key): constant(value, names) for key, value in keywords.items()}, node)
    if function in _FUNCTIONS and node.args and not keywords:
        values = [constant(part, names) for part in node.args]
        if all(_is_number(value) for value in values):
            return _applied(node, _FUNCTIONS[function], values)
    return ast.unparse(node)


def _binary(node: ast.BinOp, names: Mapping[str, Any]) -> Any:
    sides = [constant(side, names) for side in (node.left, node.right)]
    if isinstance(node.op, ast.Pow) and not all(_is_number(side) and abs(side) <= 64 for side in sides):
        return ast.unparse(node)
    if all(_is_number(side) for side in sides):
        return _applied(node, _OPERATORS[type(node.op)], sides)
    return ast.unparse(node)


def _applied(node: ast.expr, function: Callable[..., Any], values: list[Any]) -> Any:
    try:
        result = function(*values)
    except (ArithmeticError, TypeError, ValueError):
        return ast.unparse(node)
    return result if isinstance(result, int | float) and abs(result) <= _LARGEST else ast.unparse(node)


def _bounded(value: Any, node: ast.expr) -> Any:
    """Return a list or dict, or its source text if its names expand to more than `_MOST_PARTS` elements."""
    waiting, count = [value], 0
    while waiting and count <= _MOST_PARTS:
        part = waiting.pop()
        count += 1
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return value if not waiting and count <= _MOST_PARTS else ast.unparse(node)


def _part(value: Any, key: Any, node: ast.expr) -> Any:
    if isinstance(value, dict) and isinstance(key, str) and key in value:
        return value[key]
    if isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
        return value[key]
    return ast.unparse(node)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Value = str | list[str]
LONGEST_VALUE: Final = 1_000_000
"""Length limit of a variable, in characters."""
_NAMED: Final = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_PIECES: Final = re.compile(r"(?:<[A-Za-z][^<>\n]*>|\S)+")
"""Words of an unquoted value; a placeholder such as `<path to the data>` is one word."""


@dataclass
class Scope:
    """Variables of a script.

    Attributes:
        variables: name → text, or a list for an array.
        positional: positional parameters, from `$1`.
        unset: names that were used but never set, in order of use.
    """

    where: str
    folder: Path
    variables: dict[str, Value] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)

    def get(self, name: str) -> Value | None:
        """Return the value of a variable or parameter, or None if it is not set."""
        if name.isdecimal():
            place = int(name) if len(name) < 4 else len(self.positional) + 1
            if place == 0:
                return self.where
            return self.positional[place - 1] if place <= len(self.positional) else None
        if name in ("@", "*"):
            return list(self.positional)
        if name == "#":
            return str(len(self.positional))
        if name in ("PWD", "OLDPWD"):
            return str(self.folder)
        if name == "BASH_SOURCE":
            return self.where
        return self.variables.get(name)

    def put(self, name: str, value: Value) -> None:
        """Set a variable; raise a `UserError` if its value is too long, as when a variable doubles repeatedly."""
        if (len(value) if isinstance(value, str) else sum(len(item) + 1 for item in value)) > LONGEST_VALUE:
            raise UserError(f"{self.where}: a variable in it grows beyond {LONGEST_VALUE:,} characters.")
        self.variables[name] = value


class Expander:
    """Expansion of shell words with the variables of a script.

    Args:
        scope: variables of the script.
        empty: whether unset variables are empty, as in a test; otherwise they stay as written, as `$NAME`.
    """

    def __init__(self, scope: Scope, empty: bool = False) -> None:
        self._scope, self._empty = scope, empty

    def fields(self, raw: str) -> list[str]:
        """Expand a word to words; unquoted values are split at spaces."""
        done: list[str] = []
        current: str | None = None
        for text, kind in self._parts(raw):
            if kind == "split" and isinstance(text, str):
                pieces = _PIECES.findall(text)
                if text[:1].isspace() and current is not None:
                    done.append(current)
                    current = None
                for place, piece in enumerate(pieces):
                    if place and current is not None:
                        done.append(current)
                        current = None
                    current = (current or "") + piece
                if text[-1:].isspace() and current is not None and pieces:
                    done.append(current)
                    current = None
            elif isinstance(text, list):
                items = [piece for item in text for piece in (_PIECES.findall(item) if kind == "split" else [item])]
                for place, item in enumerate(items):
                    if place and current is not None:
                        done.append(current)
                        current = None
                    current = (current or "") + item
            else:
                current = (current or "") + text
        return done if current is None else [*done, current]

    def text(self, raw: str) -> str:
        """Expand a word to a single text, as in an assignment."""
        parts = (" ".join(text) if isinstance(text, list) else text for text, _ in self._parts(raw))
        return "".join(parts)

    def _parts(self, raw: str) -> Iterator[tuple[Value, str]]:
        """Yield the pieces of a word: literal ("kept"), or to be split into words ("split")."""
        place = 0
        lexer = Lexer(raw, self._scope.where)
        while place < len(raw):
            char = raw[place]
            if char == "\\":
                if raw[place + 1 : place + 2] != "\n":
                    yield raw[place + 1 : place + 2], "kept"
                place += 2
            elif char == "'":
                end = lexer.quote_end(place)
                yield raw[place + 1 : end - 1], "kept"
                place = end
            elif char == '"':
                end = lexer.double_end(place)
                yield "", "kept"
                yield from ((text, "kept") for text in self._quoted(raw[place + 1 : end - 1]))
                place = end
            elif char in "$`":
                value, place = self._dollar(raw, place, lexer)
                yield value, "split"
            else:
                yield char, "kept"
                place += 1

    def _quoted(self, raw: str) -> Iterator[Value]:
        place = 0
        lexer = Lexer(raw, self._scope.where)
        while place < len(raw):
            if raw[place] == "\\" and raw[place + 1 : place + 2] in ("$", '"', "\\", "`", "\n"):
                yield raw[place + 1].replace("\n", "")
                place += 2
            elif raw[place] in "$`":
                value, place = self._dollar(raw, place, lexer)
                yield value
            else:
                yield raw[place]
                place += 1

    def _dollar(self, raw: str, place: int, lexer: Lexer) -> tuple[Value, int]:
        if raw[place] == "`":
            end = lexer.find("`", place + 1) + 1
            return self._command(raw[place + 1 : end - 1], raw[place:end]), end
        following = raw[place + 1 : place + 2]
        if raw.startswith("((", place + 1):
            end = lexer.nested(place + 1)
            return self._sum(raw[place + 3 : end - 2], raw[place:end]), end
        if following == "(":
            end = lexer.nested(place + 1)
            return self._command(raw[place + 2 : end - 1], raw[place:end]), end
        if following == "{":
            end = lexer.nested(place + 1)
            return self._parameter(raw[place + 2 : end - 1], raw[place:end]), end
        if name := re.match(r"[A-Za-z_]\w*|[0-9@*#?$!-]", raw[place + 1 :]):
            end = place + 1 + len(name[0])
            return self._variable(name[0], raw[place:end]), end
        return "$", place + 1

    def _variable(self, name: str, raw: str) -> Value:
        value = self._scope.get(name)
        if value is None:
            self._scope.unset.append(name)
            return "" if self._empty else raw
        if isinstance(value, list) and name not in ("@", "*"):
            return value[0] if value else ""
        return value

    def _parameter(self, inner: str, raw: str) -> Value:
        found = _NAMED.fullmatch(inner)
        if found is None:
            return raw
        prefix, name, index, rest = found[1], found[2], found[3], found[4]
        if inner == "#":
            prefix, name = "", "#"
        value = self._indexed(self._scope.get(name), name, index)
        if prefix == "#":
            return str(len(value or ""))
        if prefix == "!":
            return self._variable(str(value), raw) if isinstance(value, str) else raw
        if value is None and index is not None and not rest:
            return "" if index in ("@", "*") else self._missing(name, raw)
        return self._with_operator(value, name, rest, raw)

    def _indexed(self, value: Value | None, name: str, index: str | None) -> Value | None:
        if index in ("@", "*") or value is None or name in ("@", "*"):
            return [value] if isinstance(value, str) and index in ("@", "*") else value
        items = value if isinstance(value, list) else [value]
        number = self.text(index) if index else "0"
        place = int(number) if re.fullmatch(r"-?\d{1,6}", number) else 0
        return items[place] if -len(items) <= place < len(items) else None

    def _missing(self, name: str, raw: str) -> str:
        self._scope.unset.append(name)
        return "" if self._empty else raw

    def _with_operator(self, value: Value | None, name: str, rest: str, raw: str) -> Value:
        lacks = value is None or (rest.startswith(":") and not value)
        for sign in (":-", ":=", ":?", ":+", "-", "=", "?", "+"):
            if not rest.startswith(sign):
                continue
            given = rest[len(sign) :]
            if sign.endswith("+"):
                return "" if lacks else self.text(given)
            if not lacks and value is not None:
                return value
            if sign.endswith("?"):
                return self._missing(name, raw)
            default = self.text(given)
            if sign.endswith("="):
                self._scope.put(name, default)
            return default
        if value is None:
            return self._missing(name, raw)
        if isinstance(value, list):
            return value if not rest else [self._edited(item, rest, raw) for item in value]
        return self._edited(value, rest, raw)

    def _edited(self, value: str, rest: str, raw: str) -> str:
        """Apply `%`, `#`, `/`, `,,`, `^^` or `:from:length` to a value."""
        if not rest:
            return value
        if rest in (",,", "^^"):
            return value.lower() if rest == ",," else value.upper()
        if part := re.fullmatch(r":\s*(-?\d{1,6})(?::(\d{1,6}))?", rest):
            begin = int(part[1])
            return value[begin:] if part[2] is None else value[begin:][: int(part[2])]
        if len(value) > 1_000:
            return raw
        for sign, ends in (("%%", range(len(value) + 1)), ("%", range(len(value), -1, -1))):
            if rest.startswith(sign):
                pattern = re.compile(translate(self.text(rest[len(sign) :])))
                return next((value[:end] for end in ends if pattern.fullmatch(value[end:])), value)
        for sign, begins in (("##", range(len(value), -1, -1)), ("#", range(len(value) + 1))):
            if rest.startswith(sign):
                pattern = re.compile(translate(self.text(rest[len(sign) :])))
                return next((value[begin:] for begin in begins if pattern.fullmatch(value[:begin])), value)
        if rest.startswith("/"):
            old, _, new = rest.lstrip("/").partition("/")
            return value.replace(self.text(old), self.text(new), -1 if rest.startswith("//") else 1)
        return raw

    def _sum(self, inner: str, raw: str) -> str:
        inner = self.text(inner)

        def named(found: re.Match[str]) -> str:
            value = self._scope.get(found[0])
            return value if isinstance(value, str) and value else found[0]

        spelled = re.sub(r"[A-Za-z_]\w*", named, inner).strip().replace("\n", " ")
        spelled = re.sub(r"(?<!/)/(?!/)", "//", spelled)
        try:
            return str(int(constant(cast(ast.Expression, parsed(spelled, expression=True)).body, {})))
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            return raw

    def _command(self, inner: str, raw: str) -> str:
        """Evaluate a command inside `$(…)`, if it only handles paths or does arithmetic."""
        words = [field for part in _words_of(inner, self._scope.where) for field in self.fields(part)]
        known: dict[str, Callable[[list[str]], str]] = {
            "pwd": lambda _: str(self._scope.folder),
            "dirname": lambda given: os.path.dirname(given[0]) or ".",
            "basename": lambda given: os.path.basename(given[0]),
            "realpath": lambda given: given[-1],
            "readlink": lambda given: given[-1],
            "echo": lambda given: " ".join(word for word in given if word not in ("-n", "-e")),
        }
        if words[:1] == ["cd"] and words[-1] == "pwd":
            return words[1] if len(words) > 2 else str(self._scope.folder)
        if words[:1] == ["expr"]:
            return self._sum(" ".join(words[1:]), raw)
        if words and words[0] in known and (len(words) > 1 or words[0] in ("pwd", "echo")):
            return known[words[0]](words[1:])
        self._scope.unset.append(raw)
        return "" if self._empty else raw


def _words_of(text: str, where: str) -> list[str]:
    lexer = Lexer(text, where)
    lexer.run()
    return [word.text for word in lexer.words if not word.operator or word.text == "|"]
