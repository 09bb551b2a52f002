"""Interpreter of shell scripts, as far as a script alone determines its control flow; nothing is executed."""

import os.path
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from threefold.convert.key_mapping import foreign_text
from threefold.convert.shell_words import Expander, Scope, line_of, parse, source, words_of
from threefold.errors import UserError

if TYPE_CHECKING:
    from tree_sitter import Node

_SILENT: Final = re.compile(
    r"echo|printf|mkdir|rm|ls|cat|tee|cp|mv|cd|pip|pip3|git|set|trap|ulimit|module|wait|sleep|date|which|"
    r"chmod|touch|ln|kill|pkill|read|test|true|false|:|logger|hostname|nvidia\-smi|unalias|alias|"
    r"conda|pushd|popd|tar|wget|curl|awk|sed|grep|head|tail|sort|uniq|wc"
)
"""Commands that never start a training."""
_SBATCH: Final = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_FLAG: Final = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
_TEXT: Final = re.compile(r"\S\s.*\.py(?=[\s;]|$)|\.py\s", re.DOTALL)
"""A command line given as one word of another command, as after `bash -c`."""
_MOST_COMMANDS: Final = 20_000
_DEEPEST: Final = 12


class Command(NamedTuple):
    """Command that a script starts; `batch` has the words of `#SBATCH` lines above it and of commands around it."""

    words: list[str]
    line: int
    batch: list[str]


class _Ended(Exception):
    """End of the script by `exit`, or by `return` outside a function."""


class Script:
    """Script, interpreted without arguments in an empty environment; files that it reads are looked up beside `path`.

    `scope` has the variables at its end, `commands` what it starts, in order. `remarks` are (line, what, reason) of
    each decision about a part that depends on facts outside the script, `missing` (line, name) of each file that it
    reads and that does not exist. Raises a `UserError` for a text that is no shell script, or does not end.
    """

    def __init__(self, text: str, path: Path) -> None:
        self.scope = Scope(str(path), path.parent)
        self.commands: list[Command] = []
        self.remarks: list[tuple[int, str, str]] = []
        self.missing: list[tuple[int, str]] = []
        self._functions: dict[str, Node] = {}
        self._batch: list[str] = []
        self._depth = self._count = 0
        try:
            self._text(text)
        except RecursionError:
            raise UserError(f"{path}: not a shell script that can be read: it is nested too deeply.") from None

    def _text(self, text: str, given: list[str] | None = None, batch: Iterable[str] = ()) -> None:
        """Interpret a text, with the arguments `given` and the words `batch` before it, up to its end or its `exit`."""
        marked = (word for line in _SBATCH.findall(text) for word in line.split())
        self._descend([parse(text, self.scope.where)], given, [*batch, *marked])

    def _descend(self, nodes: Iterable["Node"], given: list[str] | None, batch: Iterable[str] = ()) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise UserError(
                f"{self.scope.where}: scripts or functions in it call each other more than {_DEEPEST} deep."
            )
        positional, before = self.scope.positional, self._batch
        self.scope.positional, self._batch = positional if given is None else given, [*before, *batch]
        with suppress(_Ended):
            self._nodes(nodes)
        self.scope.positional, self._batch = positional, before
        self._depth -= 1

    def _nodes(self, nodes: Iterable["Node"]) -> None:
        for node in nodes:
            self._node(node)

    def _node(self, node: "Node") -> None:
        match node.type:
            case "command":
                self._simple(node, words_of(node), "")
            case "redirected_statement":
                self._redirected(node)
            case "list":
                self._chain(node)
            case "if_statement":
                self._choose(node)
            case "case_statement":
                self._case(node)
            case "for_statement" | "while_statement" | "c_style_for_statement":
                self._loop(node)
            case "function_definition":
                self._functions[source(node.child_by_field_name("name") or node)] = node.children[-1]
            case "variable_assignment":
                self._assign(node)
            case "unset_command":
                for word in node.named_children:
                    self.scope.variables.pop(source(word), None)
            case "compound_statement" if node.children[0].type == "((":
                pass
            case "program" | "compound_statement" | "subshell" | "do_group" | "pipeline" | "negated_command":
                self._nodes(node.named_children)
            case "declaration_command" | "variable_assignments":
                self._nodes(part for part in node.named_children if part.type == "variable_assignment")

    def _redirected(self, node: "Node") -> None:
        """Interpret a command with redirections, and what the grammar puts after the start of a here-document."""
        body = node.child_by_field_name("body")
        heredocs = [part for part in node.named_children if part.type == "heredoc_redirect"]
        heredoc = "".join(source(part).partition("\n")[2].rpartition("\n")[0] for part in heredocs)
        if body is not None and body.type == "command":
            self._simple(body, words_of(node), heredoc)
        elif body is not None:
            self._node(body)
        for part in heredocs:
            self._nodes(each for each in part.named_children if not each.type.startswith(("heredoc_", "file_")))

    def _chain(self, node: "Node") -> bool | None:
        """Interpret `a && b || c`, assuming that commands other than tests succeed; return its success."""
        if node.type != "list":
            result = holds(node, self.scope, [])
            if result is None:
                self._node(node)
            return True if result is None else result
        left, right = node.named_children[0], node.named_children[-1]
        operator = node.children[1].type
        success = self._chain(left)
        if success is (operator == "||"):
            self._leave_out(line_of(right), operator, [right], "not reached if all before it succeeds")
            return success
        return self._chain(right)

    def _choose(self, node: "Node") -> None:
        taken: list[Node] | None = None
        left: list[list[Node]] = []
        assumed: list[str] = []
        for clause in [node, *(part for part in node.named_children if part.type in ("elif_clause", "else_clause"))]:
            then = next((part.end_byte for part in clause.children if part.type == "then"), clause.start_byte)
            others = ("elif_clause", "else_clause", "comment")
            parts = [part for part in clause.named_children if part.type not in others]
            before = [part for part in parts if part.end_byte <= then]
            condition, body = before[-1] if before else None, parts[len(before) :]  # no condition for `else`
            if taken is not None or (_ends(body) and condition is not None):
                left.append(body)
                continue
            result = condition is None or holds(condition, self.scope, assumed)
            if result is None:
                assumed.append("a command's result")
            if result and not _ends(body):
                taken = body
            else:
                left.append(body)
        for body in left:
            self._leave_out(line_of(node), "if", body, _assumption(assumed))
        self._nodes(taken or [])

    def _case(self, node: "Node") -> None:
        expander = Expander(self.scope, empty=True)
        before = len(self.scope.unset)
        value = expander.text(node.child_by_field_name("value"))
        assumed = self.scope.unset[before:]
        taken = False
        for item in [part for part in node.named_children if part.type == "case_item"]:
            patterns = item.children_by_field_name("value")
            body = [part for part in item.named_children if part not in patterns]
            if not taken and any(fnmatchcase(value, expander.text(pattern)) for pattern in patterns):
                taken = True
                if not _ends(body):
                    self._nodes(body)
                continue
            self._leave_out(line_of(node), "case", body, _assumption(assumed))

    def _loop(self, node: "Node") -> None:
        body = node.child_by_field_name("body")
        assert body is not None
        if node.type != "for_statement":
            condition = node.named_children[0]
            if node.type == "c_style_for_statement" or holds(condition, self.scope, []) is not False:
                reason = "not taken, as how often it runs is not in the file"
                self._leave_out(line_of(node), "loop", [body], reason)
            return
        name = source(node.child_by_field_name("variable") or node)
        words = node.children_by_field_name("value")
        for value in [value for word in words for value in Expander(self.scope).fields(word)]:
            self.scope.put(name, value)
            self._node(body)

    def _leave_out(self, line: int, what: str, body: Iterable["Node"], reason: str) -> None:
        if flags := list(dict.fromkeys(flag for node in body for flag in _flags_in(node))):
            self.remarks.append((line, what, f"{reason}; left out: {', '.join(flags)}"))

    def _simple(self, node: "Node", parts: list["Node"], heredoc: str) -> None:
        self._count += 1
        if self._count > _MOST_COMMANDS:
            raise UserError(f"{self.scope.where}: it runs more than {_MOST_COMMANDS:,} commands.")
        self._nodes(part for part in node.named_children if part.type == "variable_assignment")
        words = [text for part in parts for text in Expander(self.scope).fields(part)]
        name = words[0] if words else ""
        if name in ("source", ".") and len(words) > 1:
            self._run_script(words[1], [], line_of(node), None)
        elif name in ("exit", "return"):
            raise _Ended
        elif name == "eval":
            self._text(" ".join(words[1:]))
        elif name == "shift":
            del self.scope.positional[:1]
        elif name in self._functions:
            self._descend([self._functions[name]], words[1:])
        elif name and not _SILENT.fullmatch(name):
            self._start(words, line_of(node), heredoc)

    def _assign(self, node: "Node") -> None:
        target, given = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert target is not None
        name, index = source(target).partition("[")[0], target.child_by_field_name("index")
        appended = any(part.type == "+=" for part in node.children)
        old = self.scope.variables.get(name)
        items = list(old or ())
        expander = Expander(self.scope)
        if given is not None and given.type == "array":
            words = [part for part in given.named_children if part.type != "comment"]
            fields = [text for word in words for text in expander.fields(word)]
            self.scope.put(name, *(items if appended else ()), *fields)
            return
        raw = "" if given is None else source(given)
        if old is None and re.search(rf"\$\{{?{name}\b", raw) and not re.fullmatch(rf'"?\$\{{?{name}\}}?"?', raw):
            self.scope.put(name, "")  # as in ARGS="$ARGS --more" for the first time
        value, number = expander.text(given), expander.text(index)
        place = 0 if index is None else int(number) if re.fullmatch(r"\d{1,3}", number) else len(items)
        if index is None and not appended:
            items = []
        items += [""] * (place + 1 - len(items))
        items[place] = items[place] + value if appended else value
        self.scope.put(name, *items)

    def _start(self, words: list[str], line: int, heredoc: str) -> None:
        texts = [word for word in words[1:] if _TEXT.search(re.sub(r"<[^<>]*>", "", word))]
        scripts = [word for word in words if word.endswith((".sh", ".slurm", ".sbatch"))]
        if texts or (heredoc and words[0] in ("bash", "sh", "zsh", "sbatch", "qsub", "srun", "ssh")):
            for text in [text.removeprefix("--wrap=") for text in texts] or [heredoc.replace("\\$", "$")]:
                self._text(text, batch=[word for word in words if word not in texts])
        elif scripts and not any(word.endswith(".py") for word in words):
            place = words.index(scripts[0])
            self._run_script(scripts[0], words[:place], line, words[place + 1 :])
        elif any(word.startswith("--") or word.endswith(".py") for word in words):
            self.commands.append(Command(words, line, list(self._batch)))

    def _run_script(self, name: str, batch: list[str], line: int, given: list[str] | None) -> None:
        """Interpret a file, started by the words of `batch` with the arguments `given`."""
        name = re.sub(r"^(?:\$PWD|\$\{PWD\}|\$\(pwd\))/", "", name)
        path = self.scope.folder / name
        if os.path.isfile(path):
            self._text(foreign_text(path), given, batch)
        else:
            self.missing.append((line, name))


def _assumption(unset: list[str]) -> str:
    names = ", ".join(dict.fromkeys(unset))
    return f"not taken, as though {names} were not set" if names else "not taken, as the script sets it"


def _ends(body: list["Node"]) -> bool:
    """Return whether a branch ends the script, as after an error message."""
    return any(
        (node.type == "command" and source(node).split(maxsplit=1)[0] in ("exit", "return"))
        or (node.type in ("compound_statement", "subshell") and _ends(node.named_children))
        or (node.type in ("list", "pipeline") and _ends(node.named_children[:1]))
        for node in body
    )


def _flags_in(node: "Node") -> Iterator[str]:
    if node.type == "comment" or (
        node.type == "command" and (words := words_of(node)) and _SILENT.fullmatch(source(words[0]))
    ):
        return
    if not node.children:
        yield from _FLAG.findall(source(node))
    for child in node.children:
        yield from _flags_in(child)


_NUMBERS: Final = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}
_OF_FILES: Final = ("-f", "-d", "-e", "-s", "-r", "-x", "-w", "-h", "-L")


def holds(condition: "Node", scope: Scope, assumed: list[str]) -> bool | None:
    """Return the truth of a condition, None if a command decides; names in `assumed` are not set and count as empty."""
    parts = condition.named_children
    if condition.type in ("compound_statement", "subshell") and condition.children[0].type != "((" and parts:
        return holds(parts[-1], scope, assumed)
    if condition.type == "redirected_statement":
        return holds(parts[0], scope, assumed)
    if condition.type == "negated_command":
        return _negated(holds(parts[0], scope, assumed))
    if condition.type == "list":
        left, right = (holds(part, scope, assumed) for part in (parts[0], parts[-1]))
        return _both(left, right) if condition.children[1].type == "&&" else _either(left, right)
    words = list(_test_words(condition)) if condition.type == "test_command" else words_of(condition)
    name = source(words[0]) if words else ""
    if name in ("true", ":", "false"):
        return name != "false"
    if name not in ("[", "[[", "test"):
        return None
    before = len(scope.unset)
    expanded = [Expander(scope, empty=True).text(word) for word in words[1:]]
    assumed += dict.fromkeys(scope.unset[before:])
    if any(count in source(condition) for count in ("$#", "${#}", "$@")):
        assumed.append("arguments")
    return _test(expanded if name == "test" else expanded[:-1], scope, assumed)


def _negated(value: bool | None) -> bool | None:
    return value if value is None else not value


def _both(a: bool | None, b: bool | None) -> bool | None:
    return False if False in (a, b) else None if None in (a, b) else True


def _either(a: bool | None, b: bool | None) -> bool | None:
    return True if True in (a, b) else None if None in (a, b) else False


def _test_words(node: "Node") -> Iterator["Node"]:
    """Yield the words of a test: the grammar does not know that `-a` binds less than a comparison."""
    for child in node.children:
        if child.type in ("binary_expression", "unary_expression", "parenthesized_expression"):
            yield from _test_words(child)
        else:
            yield child


_JOINING: Final = ((("||", "-o"), _either), (("&&", "-a"), _both))


def _test(words: list[str], scope: Scope, assumed: list[str], level: int = 0) -> bool | None:
    """Evaluate the words of `[ ]` or `[[ ]]` up to an operator that binds less than those of `level`; remove them."""
    if level < len(_JOINING):
        signs, joined = _JOINING[level]
        result = _test(words, scope, assumed, level + 1)
        while words and words[0] in signs:
            del words[0]
            result = joined(result, _test(words, scope, assumed, level + 1))
        return result
    first, second, third = [*words[:3], "", "", ""][:3]
    if first == "!":
        del words[0]
        return _negated(_test(words, scope, assumed, level))
    if first == "(":
        del words[0]
        result = _test(words, scope, assumed)
        del words[:1]
        return result
    if first in ("-z", "-n", "-v", "-t", *_OF_FILES):
        del words[:2]
        if first in _OF_FILES:
            assumed.append(f"the file {second}" if second else "a file")
            return bool(second) and os.path.exists(scope.folder / second)
        return bool(second) == (first == "-n") if first in ("-z", "-n") else scope.get(second) is not None
    if second in ("", "&&", "||", "-a", "-o", ")"):
        del words[:1]
        return bool(first)
    del words[:3]
    if second in ("=", "==", "!="):
        return (first == third or fnmatchcase(first, third)) == (second != "!=")
    if second in _NUMBERS:
        if re.fullmatch(r"-?\d{1,18}", first) and re.fullmatch(r"-?\d{1,18}", third):
            return _NUMBERS[second](int(first), int(third))
        return False if not first or not third else None
    return (first < third) == (second == "<") if second in ("<", ">") else None
