"""Words of shell scripts: parsing with the grammar of tree-sitter, and expansion with the variables of a script."""

import ast
import os.path
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from threefold.convert.key_mapping import constant, parsed
from threefold.errors import UserError

if TYPE_CHECKING:
    from tree_sitter import Node

LONGEST_VALUE: Final = 1_000_000  # length limit of a variable, in characters
_MOST_TOKENS: Final = 300  # number of tokens of a mistake above which it is a nesting that the grammar gave up on
_PLACEHOLDER: Final = re.compile(r"(?<!<)<[A-Za-z](?:[^<>\n]*[^<>\s\d])?>")
"""Text to be replaced by the reader of a script, such as `<path to the data>`: one word, and no redirection."""
_UNKNOWN: Final = re.compile(r"\$\{\w+:\$\w+[^{}\s]+\}")
"""Slice such as `${NAME:$BEGIN+1}`, which the grammar does not know; it stays as written."""
_BARE: Final = re.compile(r"(?<=[^\s\\\"'`$({=])\$([A-Za-z_]\w*|[0-9@*#])")
"""`$NAME` inside a word, where the grammar would end the word, as in `$DIR/$NAME.json`; it reads `${NAME}`."""
_CONTINUED: Final = re.compile(r"^([^#\n]*[^\s\\#])\\\n(?=[^\s#])", re.MULTILINE)
"""Start of a word that continues on the next line, where the grammar would end it."""
_HIDDEN: Final = {ord(sign): 0xE000 + ord(sign) for sign in string.punctuation + " \t"}
_SHOWN: Final = {hidden: sign for sign, hidden in _HIDDEN.items()}
_SPACES: Final = re.compile(r"(<[A-Za-z][^<>\n]*>)|\s+")
"""Spaces that separate the words of an unquoted value, except those inside a placeholder."""
_BREAK, _KEPT = "\uf000", "\uf001"
"""Marks in a word while it is expanded: its end, and a part that is there even if it is empty."""
_CLOSING: Final = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
_EXPANSIONS: Final = ("simple_expansion", "expansion", "arithmetic_expansion", "command_substitution")


def parse(text: str, where: str) -> "Node":
    """Parse a script; raise a `UserError` if something is not closed or is out of place."""
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError:
        raise UserError(
            f"{where}: shell scripts need tree-sitter to be read; install it with pip install 'threefold[convert]'."
        ) from None
    text = text.replace("\r\n", "\n").replace("\0", " ").rstrip().removesuffix("\\")
    for pattern in (_PLACEHOLDER, _UNKNOWN):
        text = pattern.sub(lambda found: found[0].translate(_HIDDEN), text)
    text = _BARE.sub(r"${\1}", _CONTINUED.sub(r"\1", text))
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    if root.has_error:
        line, what = _mistake(root)
        raise UserError(f"{where}, line {line}: not a shell script that can be read: {what}.")
    return root


def source(node: "Node") -> str:
    """Return the text of a node as written in the script."""
    return _shown(node.text or b"")


def _shown(text: bytes) -> str:
    return text.decode(errors="replace").translate(_SHOWN)


def line_of(node: "Node") -> int:
    return node.start_point[0] + 1


def _mistake(root: "Node") -> tuple[int, str]:
    """Return line and description of the first mistake in a tree."""
    node = next(node for node in _nodes(root) if node.type == "ERROR" or node.is_missing)
    parent = node.parent or root
    if node.is_missing and parent.type == "array" and parent.parent:
        return line_of(parent), f"the array {source(parent.parent).partition('=')[0].rstrip('+')} does not close"
    if node.is_missing and parent.type in _EXPANSIONS:
        return line_of(parent), f"a {node.type} is missing in it"
    if node.is_missing and node.type in (*_CLOSING.values(), ")", "}"):
        opened = parent.parent if parent.type == "do_group" and parent.parent else parent
        return line_of(opened), f"{source(opened.children[0])} without {node.type}"
    tokens = [leaf for leaf in _nodes(node) if not leaf.children]
    unclosed: list[Node] = []
    for token in tokens:
        if token.type in _CLOSING:
            unclosed.append(token)
        elif unclosed and token.type == _CLOSING[unclosed[-1].type]:
            unclosed.pop()
    if len(tokens) > _MOST_TOKENS:
        return line_of(node), "it is nested too deeply"
    if [token.type for token in tokens[:2]] == ["(", ")"] and parent.type == "command":
        return line_of(parent), f"function {source(parent.children[0])} without {{"
    if unclosed:
        return line_of(unclosed[-1]), f"{unclosed[-1].type} without {_CLOSING[unclosed[-1].type]}"
    if any(sign in source(node) for sign in "\"'"):
        return line_of(node), "a quote in it does not close"
    found = re.search(r"[;&|<]{1,2}|[^\w\s]|\w{1,40}", _shown((root.text or b"")[node.start_byte - root.start_byte :]))
    return line_of(node), f"{found[0] if found else 'its end'} is out of place"


def _nodes(node: "Node") -> Iterator["Node"]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


@dataclass
class Scope:
    """Variables of a script, each a list of items (a text is one item), and names that were used but never set."""

    where: str
    folder: Path
    variables: dict[str, list[str]] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)

    def get(self, name: str) -> list[str] | None:
        """Return the items of a variable or parameter, or None if it is not set."""
        if name.isdecimal() and int(name[:4]) > 0:
            return self.positional[int(name[:4]) - 1 :][:1] or None
        if name in ("@", "*"):
            return list(self.positional)
        known = {"#": str(len(self.positional)), "0": self.where, "BASH_SOURCE": self.where}
        known |= dict.fromkeys(("PWD", "OLDPWD"), str(self.folder))
        return [known[name]] if name in known else self.variables.get(name)

    def put(self, name: str, *items: str) -> None:
        """Set a variable; raise a `UserError` if its value is too long, as when a variable doubles repeatedly."""
        if sum(len(item) + 1 for item in items) > LONGEST_VALUE:
            raise UserError(f"{self.where}: a variable in it grows beyond {LONGEST_VALUE:,} characters.")
        self.variables[name] = list(items)


class Expander:
    """Expansion of words with the variables of a script; unset ones are `empty`, as in a test, or stay as written."""

    def __init__(self, scope: Scope, empty: bool = False) -> None:
        self._scope, self._empty = scope, empty

    def fields(self, word: "Node") -> list[str]:
        """Expand a word to words; unquoted values are split at spaces."""
        joined = ""
        for items, split in self._pieces(word):
            if split:
                items = [_SPACES.sub(lambda found: found[1] or _BREAK, item) for item in items]
            joined += _BREAK.join(items if split else [_KEPT + item for item in items])
        return [field.replace(_KEPT, "") for field in joined.split(_BREAK) if field]

    def text(self, word: "Node | None") -> str:
        """Expand a word to a single text, as in an assignment; no word is empty."""
        return "" if word is None else _joined(self._pieces(word))

    def _texts(self, words: Iterable["Node"]) -> str:
        return "".join(map(self.text, words))

    def _pieces(self, node: "Node", quoted: bool = False) -> Iterator[tuple[list[str], bool]]:
        """Yield the parts of a word, each with whether it is split at spaces."""
        text = source(node)
        if node.type in ("raw_string", "ansi_c_string"):
            yield [text.lstrip("$")[1:-1]], False
        elif node.type == "string":
            yield [""], False
            yield from self._inside(node, 1, quoted=True)
        elif node.type in _EXPANSIONS:
            raw = text.lstrip(" \t\n\\")  # the grammar counts spaces before it in a string as part of it
            if len(raw) < len(text):
                yield [_unescaped(text[: len(text) - len(raw)], quoted)], False
            yield self._value(node, raw), not quoted
        elif node.type == "regex" and re.search(r"\$[\w{(]", text):  # a pattern, which the grammar leaves whole
            yield from self._pieces(parse(f'"{text}"', self._scope.where))
        elif node.children:
            yield from self._inside(node, 0, quoted)
        else:
            yield [_unescaped(text, quoted)], False

    def _inside(self, node: "Node", edge: int, quoted: bool) -> Iterator[tuple[list[str], bool]]:
        """Yield the parts of a node from `edge` after its start to `edge` before its end, and the text between them."""
        text, first, place = node.text or b"", node.start_byte, edge
        for child in node.named_children:
            if child.type != "string_content":
                if place < child.start_byte - first:
                    yield [_unescaped(_shown(text[place : child.start_byte - first]), quoted)], False
                yield from self._pieces(child, quoted)
                place = child.end_byte - first
        if place < len(text) - edge:
            yield [_unescaped(_shown(text[place : len(text) - edge]), quoted)], False

    def _value(self, node: "Node", raw: str) -> list[str]:
        if node.type == "simple_expansion":
            return self._variable(raw[1:], raw)
        if node.type == "expansion":
            return self._parameter(node, raw)
        if node.type == "command_substitution":
            return [self._command(node, raw)]
        edge = 3 if raw.startswith("$((") else 2
        return [self._sum(_joined(self._inside(node, 0, quoted=True)).strip()[edge : 1 - edge], raw)]

    def _variable(self, name: str, raw: str) -> list[str]:
        items = self._scope.get(name)
        return [self._missing(name, raw)] if items is None else items if name in ("@", "*") else items[:1]

    def _missing(self, name: str, raw: str) -> str:
        self._scope.unset.append(name)
        return "" if self._empty else raw

    def _parameter(self, node: "Node", raw: str) -> list[str]:
        """Expand `${…}`: prefix `#` or `!`, name with an index, operator and its operand."""
        parts = node.children[1:-1]
        prefix = parts.pop(0).type if len(parts) > 1 and parts[0].type in ("#", "!") else ""
        if not parts:
            return [raw]
        name = source(parts[0].child_by_field_name("name") or parts[0])
        index = self.text(parts[0].child_by_field_name("index")) or "0"
        whole = name in ("@", "*") or index in ("@", "*")
        items = self._scope.get(name)
        if not whole and items is not None:
            place = int(index) if re.fullmatch(r"-?\d{1,6}", index) else 0
            items = [items[place]] if -len(items) <= place < len(items) else None
        if prefix == "#":
            return [str(len(items or ()) if whole else len("".join(items or ())))]
        if prefix == "!":
            return self._variable(items[0], raw) if items and not whole else [raw]
        sign, given = parts[1].type if len(parts) > 1 else "", parts[2:]
        if sign in (":-", ":=", ":?", ":+", "-", "=", "?", "+"):
            lacks = items is None or (sign.startswith(":") and not "".join(items))
            if lacks == (sign in (":+", "+")):
                return [""] if lacks else items or []
            if sign in (":?", "?"):
                return [self._missing(name, raw)]
            if sign in (":=", "="):
                self._scope.put(name, self._texts(given))
            return [self._texts(given)]
        if items is None:
            return [] if whole and not sign else [self._missing(name, raw)]
        return [self._edited(item, sign, given, raw) for item in items] if sign else items

    def _edited(self, value: str, sign: str, given: list["Node"], raw: str) -> str:
        """Apply `%`, `#`, `/`, `,,`, `^^` or `:from:length` to a value."""
        if sign in (",,", "^^"):
            return value.lower() if sign == ",," else value.upper()
        if sign == ":" and (part := re.fullmatch(r"(-?\d{1,6})(?::(\d{1,6}))?", self._texts(given).replace(" ", ""))):
            rest = value[int(part[1]) :]
            return rest if part[2] is None else rest[: int(part[2])]
        if len(value) <= 1_000 and sign in ("%", "%%", "#", "##"):
            begins, cuts = sign.startswith("#"), range(len(value) + 1)
            pattern = re.compile(translate(self._texts(given)))
            for cut in cuts if begins == (len(sign) == 1) else reversed(cuts):  # the shortest first, or the longest
                if pattern.fullmatch(value[:cut] if begins else value[cut:]):
                    return value[cut:] if begins else value[:cut]
            return value
        if len(value) <= 1_000 and sign in ("/", "//"):
            middle = next((place for place, part in enumerate(given) if part.type == "/"), len(given))
            old, new = self._texts(given[:middle]), self._texts(given[middle + 1 :])
            return value.replace(old, new, -1 if sign == "//" else 1)
        return raw

    def _sum(self, inner: str, raw: str) -> str:
        def named(found: re.Match[str]) -> str:
            return "".join((self._scope.get(found[0]) or [])[:1]) or found[0]

        spelled = re.sub(r"[A-Za-z_]\w*", named, inner).strip().replace("\n", " ")
        spelled = re.sub(r"(?<!/)/(?!/)", "//", spelled)
        try:
            return str(int(constant(cast(ast.Expression, parsed(spelled, expression=True)).body, {})))
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            return raw

    def _command(self, node: "Node", raw: str) -> str:
        """Evaluate a command inside `$(…)`, if it only handles paths or does arithmetic."""
        commands = [each for each in node.named_children if each.type != "comment"]
        if len(commands) == 1 and commands[0].type == "list":
            commands = commands[0].named_children
        words = [text for command in commands for word in words_of(command) for text in self.fields(word)]
        known: dict[str, Callable[[list[str]], str]] = {
            "pwd": lambda _: str(self._scope.folder),
            "dirname": lambda given: os.path.dirname(given[0]) or ".",
            "basename": lambda given: os.path.basename(given[0]),
            **dict.fromkeys(("realpath", "readlink"), lambda given: given[-1]),
            "echo": lambda given: " ".join(word for word in given if word not in ("-n", "-e")),
        }
        if words[:1] == ["cd"] and words[-1] == "pwd":
            return words[1] if len(words) > 2 else str(self._scope.folder)
        if words[:1] == ["expr"]:
            return self._sum(" ".join(words[1:]), raw)
        if words and words[0] in known and (len(words) > 1 or words[0] in ("pwd", "echo")):
            return known[words[0]](words[1:])
        return self._missing(raw, raw)


def words_of(command: "Node") -> list["Node"]:
    """Return the words of a simple command, without assignments before it and redirections."""
    if command.type not in ("command", "redirected_statement"):
        return []
    words: list[Node] = []
    for part in command.named_children:
        if part.type == "file_redirect":  # the grammar counts words after its target as part of it
            words += part.children_by_field_name("destination")[1:]
        elif command.type == "redirected_statement":
            words += words_of(part)
        elif part.type not in ("variable_assignment", "comment", "heredoc_redirect", "herestring_redirect"):
            words.append(part)
    return words


def _joined(pieces: Iterable[tuple[list[str], bool]]) -> str:
    return "".join(" ".join(items) for items, _ in pieces)


def _unescaped(text: str, quoted: bool) -> str:
    pattern = r'\\([$"\\`\n])' if quoted else r"\\([\s\S]?)"
    return re.sub(pattern, lambda found: found[1].replace("\n", ""), text)
