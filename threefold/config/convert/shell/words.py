"""Lexer for shell scripts: words, quotes, comments, heredocs and arrays of POSIX shell and bash."""

import re
from dataclasses import dataclass, field
from typing import Final

from threefold.errors import UserError

_OPERATORS: Final = (";;", "&&", "||", ";", "|", "&", "(", ")", "\n")
_REDIRECTION: Final = re.compile(r"\d*(?:&>>?|>>|>&|>\||<&|>|<<<|<(?!<))")
_HEREDOC: Final = re.compile(r"<<(-?)\s*(['\"\\]?)([A-Za-z_]\w*)['\"]?")
_ARRAY: Final = re.compile(r"[A-Za-z_]\w*\+?=\(")
_PLACEHOLDER: Final = re.compile(r"<[A-Za-z](?:[^<>\n]*[^<>\s\d])?>")
_CLOSING: Final = {"(": ")", "{": "}"}
DEEPEST: Final = 60


@dataclass(frozen=True)
class Word:
    """A word as written, with its quotes; or an operator.

    Attributes:
        text: as written; of an array `NAME=(…)`, `NAME=`.
        line: from 1.
        operator: whether it is one.
        items: the words of an array.
    """

    text: str
    line: int
    operator: bool = False
    items: tuple["Word", ...] | None = None


@dataclass
class Lexer:
    """Splits a script into words."""

    text: str
    where: str
    place: int = 0
    line: int = 1
    words: list[Word] = field(default_factory=list)
    heredocs: list[tuple[str, bool, int]] = field(default_factory=list)
    bodies: dict[int, str] = field(default_factory=dict)

    def run(self) -> None:
        """Read the whole text into `words` and `bodies`, the heredocs by the place of the word before each.

        Raises:
            UserError: something does not close.
        """
        while self.place < len(self.text):
            self._step()

    def _step(self) -> None:
        char = self.text[self.place]
        if char in " \t\r":
            self.place += 1
        elif self.text.startswith(("\\\n", "\\\r\n"), self.place):
            self.line += 1
            self.place = self.text.index("\n", self.place) + 1
        elif char == "#":
            end = self.text.find("\n", self.place)
            self.place = len(self.text) if end < 0 else end
        elif _PLACEHOLDER.match(self.text, self.place):
            self._word()
        elif heredoc := _HEREDOC.match(self.text, self.place):
            self.heredocs.append((heredoc[3], bool(heredoc[1]), len(self.words)))
            self.place = heredoc.end()
        elif redirection := _REDIRECTION.match(self.text, self.place):
            self.place = redirection.end()
            self._skip_target()
        elif self._in_test() and self.text.startswith(("&&", "||", "(", ")", "<", ">"), self.place):
            length = 2 if char in "&|" else 1
            self._put(self.text[self.place : self.place + length], length)
        elif self.text.startswith("((", self.place) and self._at_start():
            self._put("((", 0)
            self.place = self.nested(self.place)
        elif operator := next((each for each in _OPERATORS if self.text.startswith(each, self.place)), ""):
            self.words.append(Word(operator, self.line, operator=True))
            self.place += len(operator)
            if operator == "\n":
                self.line += 1
                self._read_heredocs()
        elif array := _ARRAY.match(self.text, self.place):
            self._array(array)
        else:
            self._word()

    def _put(self, text: str, length: int) -> None:
        self.words.append(Word(text, self.line))
        self.place += length

    def _at_start(self) -> bool:
        return (
            not self.words
            or self.words[-1].operator
            or self.words[-1].text in ("if", "while", "for", "then", "do", "!")
        )

    def _in_test(self) -> bool:
        for word in reversed(self.words):
            if word.operator or word.text == "]]":
                return False
            if word.text == "[[":
                return True
        return False

    def _skip_target(self) -> None:
        while self.text[self.place : self.place + 1] in (" ", "\t"):
            self.place += 1
        if self.text[self.place : self.place + 1] not in ("", "\n", ";"):
            self.place = self._word_end(self.place)

    def _word(self) -> None:
        end = self._word_end(self.place)
        if end == self.place:  # a character that begins nothing
            end += 1
        text = self.text[self.place : end]
        self.words.append(Word(text, self.line))
        self.line += text.count("\n")
        self.place = end

    def _word_end(self, place: int) -> int:
        while place < len(self.text):
            char = self.text[place]
            if char == "\\":
                place += 2
            elif char == "'":
                place = self.quote_end(place)
            elif char == '"':
                place = self.double_end(place)
            elif char == "`":
                place = self.find("`", place + 1) + 1
            elif char == "$" and self.text[place + 1 : place + 2] in ("(", "{"):
                place = self.nested(place + 1)
            elif char == "<" and (found := _PLACEHOLDER.match(self.text, place)):
                place = found.end()
            elif char in " \t\r\n;&|()<>":
                break
            else:
                place += 1
        return min(place, len(self.text))

    def find(self, wanted: str, place: int) -> int:
        """Where `wanted` is, from `place` on."""
        found = self.text.find(wanted, place)
        if found < 0:
            raise self.error("a quote in it does not close")
        return found

    def quote_end(self, place: int) -> int:
        """The place after the single quote that closes the one at `place`."""
        return self.find("'", place + 1) + 1

    def double_end(self, place: int) -> int:
        """The place after the double quote that closes the one at `place`."""
        place += 1
        while place < len(self.text) and self.text[place] != '"':
            if self.text[place] == "\\":
                place += 2
            elif self.text[place] == "`":
                place = self.find("`", place + 1) + 1
            elif self.text[place] == "$" and self.text[place + 1 : place + 2] in ("(", "{"):
                place = self.nested(place + 1)
            else:
                place += 1
        if place >= len(self.text):
            raise self.error("a quote in it does not close")
        return place + 1

    def nested(self, place: int) -> int:
        """The place after what opens at `place` with `(` or `{`."""
        closing = [_CLOSING[self.text[place]]]
        place += 1
        while closing and place < len(self.text):
            char = self.text[place]
            if char == "\\":
                place += 1
            elif char == "'":
                place = self.quote_end(place) - 1
            elif char in _CLOSING and (char == "(" or self.text[place - 1] == "$"):
                closing.append(_CLOSING[char])
                if len(closing) > DEEPEST:
                    raise self.error("it is nested too deeply")
            elif char == closing[-1]:
                closing.pop()
            place += 1
        if closing:
            raise self.error(f"a {closing[-1]} is missing in it")
        return place

    def _array(self, array: re.Match[str]) -> None:
        inner = Lexer(self.text, self.where, array.end(), self.line)
        depth = 1
        while depth:
            if inner.place >= len(self.text):
                raise self.error(f"the array {array[0][:-2]} does not close")
            count = len(inner.words)
            inner._step()
            for word in inner.words[count:]:
                depth += {"(": 1, ")": -1}.get(word.text, 0) if word.operator else 0
        items = tuple(word for word in inner.words if not word.operator)
        self.words.append(Word(array[0][:-1], self.line, items=items))
        self.place, self.line = inner.place, inner.line

    def _read_heredocs(self) -> None:
        for delimiter, indented, count in self.heredocs:
            lines: list[str] = []
            while self.place < len(self.text):
                end = self.text.find("\n", self.place)
                end = len(self.text) if end < 0 else end
                line = self.text[self.place : end]
                self.place, self.line = end + 1, self.line + 1
                if (line.lstrip("\t") if indented else line) == delimiter:
                    break
                lines.append(line)
            self.bodies[count - 1] = self.bodies.get(count - 1, "") + "\n".join(lines) + "\n"
        self.heredocs.clear()

    def error(self, what: str) -> UserError:
        """The error that the script cannot be read, with the line."""
        return UserError(f"{self.where}, line {self.line}: not a shell script that can be read: {what}.")
