"""Interpreter of shell scripts, as far as a script itself determines its course; nothing is executed."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from threefold.convert.key_mapping import foreign_text
from threefold.convert.shell_syntax import Block, Case, Chain, Function, If, Loop, Node, Simple, Word, parse
from threefold.convert.shell_values import Expander, Scope
from threefold.errors import UserError

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
    """Return the truth of a condition, or None if it depends on the result of a command.

    Args:
        condition: commands between `if` and `then`; the last one decides.
        scope: variables of the script.
        assumed: receives the names that affect the result but that the script does not set; they count as empty.
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
    """Recursive-descent evaluator of the words inside `[ ]` or `[[ ]]`."""

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


_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(?:\[(\w+)\])?(\+?)=(.*)", re.DOTALL)
_DECLARING: Final = ("export", "declare", "local", "readonly", "typeset")
_SILENT: Final = re.compile(
    r"echo|printf|mkdir|rm|ls|cat|tee|cp|mv|cd|pip|pip3|git|set|trap|ulimit|module|wait|sleep|date|which|"
    r"chmod|touch|ln|kill|pkill|read|test|\[|\[\[|\(\(|true|false|:|logger|hostname|nvidia\-smi|unalias|alias|"
    r"conda|pushd|popd|tar|wget|curl|awk|sed|grep|head|tail|sort|uniq|wc"
)
"""Commands that never start a training."""
_SCRIPT_RUNNERS: Final = ("bash", "sh", "zsh", "sbatch", "qsub")
_SBATCH: Final = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_FLAG: Final = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
_TEXT: Final = re.compile(r"\S\s.*\.py(?=[\s;]|$)|\.py\s", re.DOTALL)
"""A command line given as one word of another command, as after `bash -c`."""
_MOST_COMMANDS: Final = 20_000
_DEEPEST: Final = 12


@dataclass(frozen=True)
class Command:
    """Command that a script starts.

    Attributes:
        batch: words of the `#SBATCH` lines above it, and of the commands that have it as an argument.
    """

    words: list[str]
    line: int
    batch: list[str]


@dataclass(frozen=True)
class Remark:
    """Decision about a part (`what`) of a script, with the reason and the flags that are left out."""

    line: int
    what: str
    reason: str


@dataclass
class Script:
    """Result of interpreting a script: its scope at the end, and the commands that it starts, in order.

    Attributes:
        remarks: decisions about parts that depend on facts outside the script.
        missing: (line, name) of each file that the script reads and that does not exist.
    """

    scope: Scope
    commands: list[Command] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    missing: list[tuple[int, str]] = field(default_factory=list)


class _Ended(Exception):
    """End of the script by `exit`, or by `return` outside a function."""


class _Runner:
    def __init__(self, script: Script) -> None:
        self.script, self.scope = script, script.scope
        self.functions: dict[str, list[Node]] = {}
        self.batch: list[str] = []
        self.depth = self.count = 0

    def text(self, text: str, where: str) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UserError(
                f"{self.scope.where}: scripts or functions in it call each other more than {_DEEPEST} deep."
            )
        self.batch = [*self.batch, *(word for line in _SBATCH.findall(text) for word in line.split())]
        self.nodes(parse(text, where))
        self.depth -= 1

    def _descend(self) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UserError(f"{self.scope.where}: scripts or functions in it call each other over {_DEEPEST} deep.")

    def nodes(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.node(node)

    def node(self, node: Node) -> None:
        if isinstance(node, Simple):
            self.simple(node)
        elif isinstance(node, Chain):
            self.chain(node)
        elif isinstance(node, If):
            self.choose(node)
        elif isinstance(node, Case):
            self.case(node)
        elif isinstance(node, Loop):
            self.loop(node)
        elif isinstance(node, Function):
            self.functions[node.name] = node.body
        else:
            self.nodes(node.body)

    def chain(self, chain: Chain) -> None:
        """Interpret `a && b || c`, assuming that commands other than tests succeed."""
        success: bool | None = True
        for operator, node in chain.parts:
            if (operator == "&&" and success is False) or (operator == "||" and success is not False):
                self._leave_out(_line_of(node), operator, [node], "not reached if all before it succeeds")
                continue
            assumed: list[str] = []
            result = holds([node], self.scope, assumed)
            if result is None:
                self.node(node)
                success = True
            else:
                success = result

    def choose(self, node: If) -> None:
        taken: list[Node] | None = None
        left: list[list[Node]] = []
        assumed: list[str] = []
        for condition, body in node.branches:
            if taken is not None or _ends(body):
                left.append(body)
                continue
            result = holds(condition, self.scope, assumed)
            if result is None:
                assumed.append("a command's result")
            if result:
                taken = body
            else:
                left.append(body)
        if taken is None:
            taken = node.otherwise if not _ends(node.otherwise) else []
        else:
            left.append(node.otherwise)
        unknown = _assumption(list(dict.fromkeys(assumed)))
        for body in left:
            self._leave_out(node.line, "if", body, unknown)
        self.nodes(taken)

    def case(self, node: Case) -> None:
        expander = Expander(self.scope, empty=True)
        before = len(self.scope.unset)
        value = expander.text(node.word.text)
        assumed = self.scope.unset[before:]
        taken = False
        for patterns, body in node.branches:
            if not taken and any(fnmatchcase(value, expander.text(pattern)) for pattern in patterns):
                taken = True
                if not _ends(body):
                    self.nodes(body)
                continue
            self._leave_out(node.line, "case", body, _assumption(assumed))

    def loop(self, node: Loop) -> None:
        if not node.name or node.name == "((":
            assumed: list[str] = []
            if node.condition and holds(node.condition, self.scope, assumed) is False:
                return
            self._leave_out(node.line, "loop", node.body, "not taken, as how often it runs is not in the file")
            return
        values = [value for word in node.words for value in Expander(self.scope).fields(word.text)]
        for value in values:
            self.scope.put(node.name, value)
            self.nodes(node.body)

    def _leave_out(self, line: int, what: str, body: list[Node], reason: str) -> None:
        if flags := list(dict.fromkeys(_flags_in(body))):
            self.script.remarks.append(Remark(line, what, f"{reason}; left out: {', '.join(flags)}"))

    def simple(self, node: Simple) -> None:
        self.count += 1
        if self.count > _MOST_COMMANDS:
            raise UserError(f"{self.scope.where}: it runs more than {_MOST_COMMANDS:,} commands.")
        words = node.words
        while words and (found := _ASSIGNED.fullmatch(words[0].text)):
            self.assign(found, words[0])
            words = words[1:]
        if words and words[0].text in _DECLARING:
            for word in words[1:]:
                if found := _ASSIGNED.fullmatch(word.text):
                    self.assign(found, word)
            return
        if words:
            self.command([field for word in words for field in Expander(self.scope).fields(word.text)], node)

    def assign(self, found: re.Match[str], word: Word) -> None:
        name, index, appended, raw = found.groups()
        expander = Expander(self.scope)
        old = self.scope.variables.get(name)
        if word.items is not None:
            items = [field for item in word.items for field in expander.fields(item.text)]
            before = old if isinstance(old, list) else [old] if old else []
            self.scope.put(name, [*before, *items] if appended else items)
            return
        if old is None and re.search(rf"\$\{{?{name}\b", raw) and not re.fullmatch(rf'"?\$\{{?{name}\}}?"?', raw):
            self.scope.variables[name] = ""  # as in ARGS="$ARGS --more" for the first time
            value = expander.text(raw)
        else:
            value = expander.text(raw)
        if index is not None:
            items = list(old) if isinstance(old, list) else []
            place = int(index) if index.isdecimal() and int(index) < 1000 else len(items)
            items += [""] * (place + 1 - len(items))
            items[place] = value
            self.scope.put(name, items)
        elif appended:
            items = [*old, value] if isinstance(old, list) else []
            self.scope.put(name, items or (old or "") + value if not isinstance(old, list) else items)
        else:
            self.scope.put(name, value)

    def command(self, words: list[str], node: Simple) -> None:
        name = words[0] if words else ""
        if name in ("source", ".") and len(words) > 1:
            self.source(words[1], node.line)
        elif name in ("exit", "return"):
            raise _Ended
        elif name == "eval":
            self.text(" ".join(words[1:]), self.scope.where)
        elif name == "unset":
            for each in words[1:]:
                self.scope.variables.pop(each, None)
        elif name == "shift":
            del self.scope.positional[:1]
        elif name in self.functions:
            self.call(name, words[1:])
        elif not _SILENT.fullmatch(name):
            self.start(words, node)

    def call(self, name: str, given: list[str]) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UserError(
                f"{self.scope.where}: scripts or functions in it call each other more than {_DEEPEST} deep."
            )
        before, self.scope.positional = self.scope.positional, given
        with suppress(_Ended):
            self.nodes(self.functions[name])
        self.scope.positional = before
        self.depth -= 1

    def start(self, words: list[str], node: Simple) -> None:
        texts = [word for word in words[1:] if _TEXT.search(re.sub(r"<[^<>]*>", "", word))]
        scripts = [word for word in words if word.endswith((".sh", ".slurm", ".sbatch"))]
        if texts or (node.heredoc and words[0] in (*_SCRIPT_RUNNERS, "srun", "ssh")):
            outer, self.batch = self.batch, [*self.batch, *(word for word in words if word not in texts)]
            for text in texts:
                self._inside(text.removeprefix("--wrap="))
            if node.heredoc and not texts:
                self._inside(node.heredoc.replace("\\$", "$"))
            self.batch = outer
        elif scripts and not any(word.endswith(".py") for word in words):
            self._run_script(scripts[0], words, node.line)
        elif any(word.startswith("--") or word.endswith(".py") for word in words):
            self.script.commands.append(Command(words, node.line, list(self.batch)))

    def _inside(self, text: str) -> None:
        try:
            self.text(text, self.scope.where)
        except _Ended:
            self.depth -= 1

    def _run_script(self, name: str, words: list[str], line: int) -> None:
        path = self._path(name)
        if not path.is_file():
            self.script.missing.append((line, name))
            return
        before, self.scope.positional = self.scope.positional, words[words.index(name) + 1 :]
        outer, self.batch = self.batch, [*self.batch, *words[: words.index(name)]]
        self._inside(foreign_text(path))
        self.scope.positional, self.batch = before, outer

    def source(self, name: str, line: int) -> None:
        path = self._path(name)
        if path.is_file():
            self._inside(foreign_text(path))
        else:
            self.script.missing.append((line, name))

    def _path(self, name: str) -> Path:
        name = re.sub(r"^(?:\$PWD|\$\{PWD\}|\$\(pwd\))/", "", name)
        return self.scope.folder / name if len(name) < 1000 and "\0" not in name else self.scope.folder


def _line_of(node: Node) -> int:
    if isinstance(node, Simple | If | Case | Loop):
        return node.line
    inner = node.body if isinstance(node, Block | Function) else [part for _, part in node.parts]
    return _line_of(inner[0]) if inner else 0


def _assumption(unset: list[str]) -> str:
    return f"not taken, as though {', '.join(unset)} were not set" if unset else "not taken, as the script sets it"


def _ends(body: list[Node]) -> bool:
    """Return whether a branch ends the script, as after an error message."""
    return any(
        (isinstance(node, Simple) and node.words and node.words[0].text in ("exit", "return"))
        or (isinstance(node, Block) and _ends(node.body))
        or (isinstance(node, Chain) and any(_ends([part]) for _, part in node.parts[:1]))
        for node in body
    )


def _flags_in(nodes: list[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Simple):
            if node.words and not _SILENT.fullmatch(node.words[0].text):
                for word in node.words:
                    for part in (word, *(word.items or ())):
                        yield from _FLAG.findall(part.text)
        elif isinstance(node, Chain):
            yield from _flags_in([part for _, part in node.parts])
        elif isinstance(node, If):
            yield from (flag for _, body in node.branches for flag in _flags_in(body))
            yield from _flags_in(node.otherwise)
        elif isinstance(node, Case):
            yield from (flag for _, body in node.branches for flag in _flags_in(body))
        else:
            yield from _flags_in(node.body)


def follow(text: str, path: Path) -> Script:
    """Interpret a script without arguments in an empty environment.

    Args:
        text: content of the script.
        path: path of the script; files that it reads are looked up beside it.

    Raises:
        UserError: the text cannot be parsed as a shell script, or does not end.
    """
    script = Script(Scope(str(path), path.parent))
    try:
        with suppress(_Ended):
            _Runner(script).text(text, str(path))
    except RecursionError:
        raise UserError(f"{path}: not a shell script that can be read: it is nested too deeply.") from None
    return script
