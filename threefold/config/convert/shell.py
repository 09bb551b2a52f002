"""The flags of a command in a shell script: enough of the language for the scripts that start trainings."""

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any

from threefold.config.convert.arithmetic import constant
from threefold.errors import UserError

_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_USED = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\})")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_NOT_OURS = re.compile(r"^(?:\d*>.*|&>.*|\||&|&&|\|\|)$")
_DEEPEST = 20


def flags_of(text: str, where: str) -> tuple[dict[str, Any], int | None]:
    """The flags of the last training that a script starts, and how many ranks it starts, if it says.

    A flag's value is True, a text, or a list of texts. A text that begins with `$` is a variable that is not set.

    Raises:
        UserError: quotes that do not close, or no flags at all.
    """
    statements = list(_statements(text, where))
    variables: dict[str, str] = {}
    commands = []
    for words in statements:
        words = words[1:] if words[:1] == ["export"] else words
        while words and (assigned := _ASSIGNED.match(words[0])):
            variables[assigned[1]] = " ".join(_expanded([assigned[2]], variables))
            words = words[1:]
        commands.append(_expanded(words, variables))
    training = [words for words in commands if any(word.endswith(".py") for word in words)]
    training = training[-1:] or [words for words in commands if any(word.startswith("--") for word in words)]
    words = [word for command in training for word in command]
    if not any(word.startswith("--") for word in words):  # a script that is sourced
        words = [word for value in variables.values() for word in _expanded([value], variables)]
    if not any(word.startswith("--") for word in words):
        raise UserError(
            f"{where} has no flags such as --num-layers 24, so it is not Megatron-LM's; say whose it is with --from."
        )
    return _flags(words, variables)


def _flags(words: list[str], variables: dict[str, str]) -> tuple[dict[str, Any], int | None]:
    scripts = [place for place, word in enumerate(words) if word.endswith(".py")]
    start = scripts[-1] + 1 if scripts else 0
    launcher, flags = dict(_collect(words[:start])), dict(_collect(words[start:]))
    nodes, local = (launcher.get(name) for name in ("nnodes", "nproc-per-node"))
    world = flags.pop("world-size", None) or _product(local, nodes)
    if world is None and "WORLD_SIZE" in variables:
        world = " ".join(_expanded([variables["WORLD_SIZE"]], variables))
    return flags, int(str(world)) if str(world).isdecimal() and int(str(world)) > 0 else None


def _product(local: Any, nodes: Any) -> str | None:
    nodes = "1" if nodes is None else str(nodes)
    return str(int(str(local)) * int(nodes)) if str(local).isdecimal() and nodes.isdecimal() else None


def _collect(words: list[str]) -> Iterator[tuple[str, Any]]:
    name, values = "", []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            yield name, True if not values else values[0] if len(values) == 1 else values
        name, equals, value = word[2:].partition("=")
        name, values = name.replace("_", "-"), [value] if equals else []


def _statements(text: str, where: str) -> Iterator[list[str]]:
    """The words of each statement; an array `NAME=(a b)` is one word `NAME=a b`."""
    text = _COMMENT.sub(r"\1", text).replace("\\\r\n", " ").replace("\\\n", " ")
    text = _SUM.sub(lambda found: f"$(({''.join(found[1].split())}))", text)
    for part in _parts(text):
        array = re.match(r"^\s*(?:export\s+|declare\s+-a\s+)?([A-Za-z_]\w*)=\((?!\()(.*)\)\s*$", part, re.DOTALL)
        try:
            words = shlex.split(array[2] if array else part)
        except ValueError:
            raise UserError(f"{where} is not a shell script that can be read: a quote in it does not close.") from None
        yield [f"{array[1]}={' '.join(words)}"] if array else _without_plumbing(words)


def _without_plumbing(words: list[str]) -> list[str]:
    return words[: next((place for place, word in enumerate(words) if _NOT_OURS.match(word)), len(words))]


def _parts(text: str) -> Iterator[str]:
    """What stands between ends of lines and semicolons, those inside quotes and parentheses apart."""
    quote, depth, part = "", 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "()":
            depth = max(0, depth + (1 if char == "(" else -1))
        elif char in "\n;" and depth == 0:
            yield part
            part = ""
            continue
        part += char
    yield part


def _expanded(words: list[str], variables: dict[str, str]) -> list[str]:
    """The words with the values of variables in them; a value of several words is as many."""
    result = []
    for word in words:
        for _ in range(_DEEPEST):
            replaced = _SUM.sub(_summed, _USED.sub(lambda used: _value(used, variables), word))
            if replaced == word:
                break
            word = replaced
        result += word.split()
    return result


def _value(used: re.Match[str], variables: dict[str, str]) -> str:
    default = used[0] if used[3] is None else used[3]
    return variables.get(used[1] or used[2], default)


def _summed(found: re.Match[str]) -> str:
    try:
        return str(int(constant(ast.parse(found[1], mode="eval").body, {})))
    except (SyntaxError, ValueError):
        return found[0]
