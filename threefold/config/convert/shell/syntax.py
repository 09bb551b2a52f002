"""Parser for shell scripts: POSIX shell and bash's arrays, as far as training scripts use them."""

import re
from dataclasses import dataclass

from threefold.config.convert.shell.words import DEEPEST, Lexer, Word
from threefold.errors import UserError


@dataclass
class Simple:
    """A simple command: its words and its heredoc."""

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
    """The definition of a function."""

    name: str
    body: list["Node"]


@dataclass
class Block:
    """A group in braces or parentheses."""

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
    """The commands of a script.

    Raises:
        UserError: a quote, a parenthesis or a compound command is not closed, or out of place.
    """
    lexer = Lexer(text, where)
    lexer.run()
    return _Parser(lexer).script()
