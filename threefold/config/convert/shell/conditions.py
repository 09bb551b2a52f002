"""Evaluates conditions of shell scripts, as far as the script itself determines them."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Final

from threefold.config.convert.shell.syntax import Block, Chain, Node, Simple
from threefold.config.convert.shell.values import Expander, Scope

_NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_OF_FILES: Final = ("-f", "-d", "-e", "-s", "-r", "-x", "-w", "-h", "-L")


def holds(condition: list[Node], scope: Scope, assumed: list[str]) -> bool | None:
    """The truth of a condition; None where it is the result of a command.

    Args:
        condition: the commands between `if` and `then`; the last one decides.
        scope: the variables.
        assumed: gets the names that the result depends on and that the script does not set; they are empty.
    """
    node = condition[-1] if condition else None
    if isinstance(node, Block):
        return holds(node.body, scope, assumed)
    if isinstance(node, Chain):
        return _chain(node, scope, assumed)
    if not isinstance(node, Simple) or not node.words:
        return None
    words = [word.text for word in node.words]
    negated = words[0] == "!"
    words = words[1:] if negated else words
    result = _simple(words, scope, assumed)
    return result if result is None or not negated else not result


def _chain(chain: Chain, scope: Scope, assumed: list[str]) -> bool | None:
    result: bool | None = None
    for operator, node in chain.parts:
        each = holds([node], scope, assumed)
        if operator == "&&":
            result = False if False in (result, each) else None if None in (result, each) else True
        elif operator == "||":
            result = True if True in (result, each) else None if None in (result, each) else False
        else:
            result = each if not operator else None
    return result


def _simple(words: list[str], scope: Scope, assumed: list[str]) -> bool | None:
    if words[:1] in (["true"], [":"]):
        return True
    if words[:1] == ["false"]:
        return False
    if words[:1] not in (["["], ["[["], ["test"]):
        return None
    inner = words[1:-1] if words[-1] in ("]", "]]") else words[1:]
    before = len(scope.unset)
    expander = Expander(scope, empty=True)
    counted = any("$#" in word or "${#}" in word or "$@" in word for word in inner)
    test = _Test([word if word in ("&&", "||", "(", ")", "!") else expander.text(word) for word in inner], scope)
    result = test.any()
    assumed += dict.fromkeys([*scope.unset[before:], *test.assumed, *(["arguments"] if counted else [])])
    return result


class _Test:
    """Recursive-descent evaluation of the words inside `[ ]` or `[[ ]]`."""

    def __init__(self, words: list[str], scope: Scope) -> None:
        self._words, self._scope, self._place = words, scope, 0
        self.assumed: list[str] = []

    def any(self) -> bool | None:
        result = self._all()
        while self._take("||", "-o"):
            right = self._all()
            result = True if True in (result, right) else None if None in (result, right) else False
        return result

    def _all(self) -> bool | None:
        result = self._one()
        while self._take("&&", "-a"):
            right = self._one()
            result = False if False in (result, right) else None if None in (result, right) else True
        return result

    def _take(self, *wanted: str) -> bool:
        if self._place < len(self._words) and self._words[self._place] in wanted:
            self._place += 1
            return True
        return False

    def _next(self) -> str:
        word = self._words[self._place] if self._place < len(self._words) else ""
        self._place += 1
        return word

    def _one(self) -> bool | None:
        negations = 0
        while self._take("!"):
            negations += 1
        if self._take("("):
            result = self.any()
            self._take(")")
        else:
            result = self._comparison()
        return result if result is None or negations % 2 == 0 else not result

    def _comparison(self) -> bool | None:
        first = self._next()
        if first in ("-z", "-n"):
            return bool(self._next()) == (first == "-n")
        if first in _OF_FILES:
            name = self._next()
            self.assumed.append(f"the file {name}" if name else "a file")
            return self._exists(name)
        if first in ("-v", "-t"):
            return self._scope.get(self._next()) is not None
        if self._place >= len(self._words) or self._words[self._place] in ("&&", "||", "-a", "-o", ")"):
            return bool(first)
        operator, second = self._next(), self._next()
        if operator in ("=", "=="):
            return first == second or fnmatchcase(first, second)
        if operator == "!=":
            return not (first == second or fnmatchcase(first, second))
        if operator in _NUMBERS:
            if re.fullmatch(r"-?\d{1,18}", first) and re.fullmatch(r"-?\d{1,18}", second):
                return _NUMBERS[operator](int(first), int(second))
            return False if not first or not second else None
        if operator in ("<", ">"):
            return first < second if operator == "<" else first > second
        return None

    def _exists(self, name: str) -> bool:
        if not name or len(name) > 1000 or "\0" in name:
            return False
        try:
            return (self._scope.folder / name).exists()
        except OSError:
            return False
