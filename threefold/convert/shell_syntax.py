"""Lexer and parser of shell scripts, with the syntax tree as dataclasses."""

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
    """Word with its quotes, or operator; `items` are the words of an array, whose `text` is `NAME=`."""

    text: str
    line: int
    operator: bool = False
    items: tuple["Word", ...] | None = None


@dataclass
class Lexer:
    text: str
    where: str
    place: int = 0
    line: int = 1
    words: list[Word] = field(default_factory=list)
    heredocs: list[tuple[str, bool, int]] = field(default_factory=list)
    bodies: dict[int, str] = field(default_factory=dict)

    def run(self) -> None:
        """Read the text into `words`, and into `bodies` the heredocs by the index of the word before each."""
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
        if end == self.place:  # a character that begins no word
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
        found = self.text.find(wanted, place)
        if found < 0:
            raise self.error("a quote in it does not close")
        return found

    def quote_end(self, place: int) -> int:
        """Return the index after the single quote that closes the one at `place`."""
        return self.find("'", place + 1) + 1

    def double_end(self, place: int) -> int:
        """Return the index after the double quote that closes the one at `place`."""
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
        """Return the index after the bracket that closes the `(` or `{` at `place`."""
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
        return UserError(f"{self.where}, line {self.line}: not a shell script that can be read: {what}.")


@dataclass
class Simple:
    """Simple command: its words and its heredoc."""

    line: int
    words: list[Word]
    heredoc: str = ""


@dataclass
class Chain:
    """Commands, each with the operator before it: "" for the first, "&&", "||" or "|"."""

    parts: list[tuple[str, "Node"]]


@dataclass
class If:
    """`if`: conditions with their bodies, and the body of `else`."""

    line: int
    branches: list[tuple[list["Node"], list["Node"]]]
    otherwise: list["Node"]


@dataclass
class Case:
    """`case`: a word, and patterns with their bodies."""

    line: int
    word: Word
    branches: list[tuple[list[str], list["Node"]]]


@dataclass
class Loop:
    """`for` with its words, or `while` and `until` with their condition."""

    line: int
    name: str
    words: list[Word]
    condition: list["Node"]
    body: list["Node"]


@dataclass
class Function:
    name: str
    body: list["Node"]


@dataclass
class Block:
    """Group in braces or parentheses."""

    body: list["Node"]


Node = Simple | Chain | If | Case | Loop | Function | Block


class _Parser:
    def __init__(self, lexer: Lexer) -> None:
        self._lexer, self._words, self._place, self._depth = lexer, lexer.words, 0, 0

    def script(self) -> list[Node]:
        nodes = self._list(())
        if word := self._peek():
            raise self._error(word.text, word.line)
        return nodes

    def _peek(self) -> Word | None:
        return self._words[self._place] if self._place < len(self._words) else None

    def _next_is(self, *texts: str) -> bool:
        word = self._peek()
        return word is not None and word.text in texts

    def _expect(self, text: str, opened: str, line: int) -> None:
        self._skip_ends()
        if not self._next_is(text):
            raise self._error(f"{opened} without {text}", line)
        self._place += 1

    def _error(self, what: str, line: int) -> UserError:
        self._lexer.line = line
        return self._lexer.error(f"{what} is out of place" if " without " not in what else what)

    def _skip_ends(self) -> None:
        while self._next_is("\n", ";", "&"):
            self._place += 1

    def _list(self, closing: tuple[str, ...]) -> list[Node]:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._lexer.error("it is nested too deeply")
        nodes: list[Node] = []
        while True:
            self._skip_ends()
            word = self._peek()
            if word is None or word.text in closing or (word.operator and word.text in (")", ";;")):
                self._depth -= 1
                return nodes
            nodes.append(self._chain())
            after = self._peek()
            if after is not None and after.text not in ("\n", ";", "&", ")", ";;"):
                raise self._error(after.text, after.line)

    def _chain(self) -> Node:
        parts: list[tuple[str, Node]] = [("", self._command())]
        while self._next_is("&&", "||", "|"):
            operator = self._words[self._place].text
            self._place += 1
            while self._next_is("\n"):
                self._place += 1
            parts.append((operator, self._command()))
        return parts[0][1] if len(parts) == 1 else Chain(parts)

    def _command(self) -> Node:
        word = self._peek()
        if word is None:
            return Simple(self._lexer.line, [])
        after = self._words[self._place + 1 : self._place + 3]
        if word.text == "if":
            return self._if(word.line)
        if word.text == "case":
            return self._case(word.line)
        if word.text in ("for", "while", "until", "select"):
            return self._loop(word)
        if word.text in ("{", "(") and (word.operator or word.text == "{"):
            self._place += 1
            closing = "}" if word.text == "{" else ")"
            body = self._list((closing,))
            self._expect(closing, word.text, word.line)
            return Block(body)
        if word.text == "function" and after and not after[0].operator:
            self._place += 2
            return self._function(after[0].text, word.line)
        if [part.text for part in after] == ["(", ")"] and re.fullmatch(r"[A-Za-z_][\w-]*", word.text):
            self._place += 1
            return self._function(word.text, word.line)
        return self._simple(word.line)

    def _function(self, name: str, line: int) -> Node:
        if self._next_is("("):
            self._place += 2
        self._skip_ends()
        if not self._next_is("{", "("):
            raise self._error(f"function {name} without {{", line)
        body = self._command()
        return Function(name, [body])

    def _if(self, line: int) -> Node:
        branches: list[tuple[list[Node], list[Node]]] = []
        while self._next_is("if", "elif"):
            self._place += 1
            condition = self._list(("then",))
            self._expect("then", "if", line)
            branches.append((condition, self._list(("elif", "else", "fi"))))
        otherwise: list[Node] = []
        if self._next_is("else"):
            self._place += 1
            otherwise = self._list(("fi",))
        self._expect("fi", "if", line)
        return If(line, branches, otherwise)

    def _case(self, line: int) -> Node:
        self._place += 1
        word = self._peek()
        if word is None:
            raise self._error("case without esac", line)
        self._place += 1
        self._expect("in", "case", line)
        branches: list[tuple[list[str], list[Node]]] = []
        while True:
            self._skip_ends()
            if self._next_is("esac") or self._peek() is None:
                break
            patterns: list[str] = []
            while (pattern := self._peek()) is not None and pattern.text != ")":
                self._place += 1
                if not pattern.operator:
                    patterns.append(pattern.text)
            self._expect(")", "case", line)
            branches.append((patterns, self._list(("esac",))))
            if self._next_is(";;"):
                self._place += 1
        self._expect("esac", "case", line)
        return Case(line, word, branches)

    def _loop(self, first: Word) -> Node:
        self._place += 1
        name, words, condition = "", [], []
        if first.text in ("for", "select"):
            name = self._words[self._place].text if self._peek() else ""
            self._place += 1
            self._skip_ends()
            while (word := self._peek()) is not None and not word.operator and word.text != "do":
                words.append(word)
                self._place += 1
        else:
            condition = self._list(("do",))
        self._expect("do", first.text, first.line)
        body = self._list(("done",))
        self._expect("done", first.text, first.line)
        return Loop(first.line, name, words[1:] if words[:1] and words[0].text == "in" else words, condition, body)

    def _simple(self, line: int) -> Node:
        begin = self._place
        while (word := self._peek()) is not None and not word.operator:
            self._place += 1
        words = self._words[begin : self._place]
        if not words:
            wrong = self._words[begin]
            raise self._error(wrong.text.replace("\n", "the end of the line"), wrong.line)
        bodies = (self._lexer.bodies[place] for place in range(begin, self._place) if place in self._lexer.bodies)
        return Simple(line, words, "".join(bodies))


def parse(text: str, where: str) -> list[Node]:
    """Parse the commands of a script; raise a `UserError` if something is not closed or is out of place."""
    lexer = Lexer(text, where)
    lexer.run()
    return _Parser(lexer).script()
