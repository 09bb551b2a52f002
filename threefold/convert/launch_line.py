"""Training command of a launch script: its flags, and the number of ranks; nothing is executed."""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from itertools import dropwhile, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from threefold.convert.key_mapping import Unmapped, shortened
from threefold.errors import UserError

_TRAINS: Final = re.compile(r"train|finetune|gpt|llama|mixtral|run_", re.IGNORECASE)
_PREPARES: Final = re.compile(r"preprocess|convert|merge|tokenize|download|generat|evaluat|export", re.IGNORECASE)
_BRANCHING: Final = (
    "if then elif else fi case esac for select while until do done function source . eval exit [ [[ { } !"
)
_PLAIN, _QUOTED, _SPACE, _BREAK = "\1\2\3\4"  # no variable's `$`, a `$` in quotes, a space in a word, one between words
_RAW: Final = re.compile(
    r"(?<![^\s;])#[^\n]*|\\\n|(?<!\S)\d(?=>)|'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|\$\{[^{}]*\}|"
    r"<[A-Za-z][^<>\n]*>|(?<=\s)\(\[[^\s()]*\)|`[^`]*`|\$\([^()]*(?:\([^()]*\)[^()]*)*\)",
    re.DOTALL,
)
"""Comment, continued line, redirected descriptor; then what is one word: quoted, `<your path>`, layers, computed."""
_VARIABLE: Final = re.compile("([$\2])(?:(\\w+)|\\{(\\w+)(\\[[@*]\\]|:-[^$\2`]*)?\\})|[$\2](?![@*#?!])|`")
_MOST: Final = 1_000_000  # characters of all expanded variables


class Launch(NamedTuple):
    """Training command of a script."""

    script: str  # Python file or module; empty if the text has only flags
    flags: dict[str, Any]  # without dashes → True, a text or a list of texts; one with `$` is not set in the file
    world: int | None  # number of ranks, if it is given
    notes: list[Unmapped]
    unread: list[str]  # words that belong to no flag


class _Script:
    """Commands and variables of a script that has only assignments, arrays and simple commands."""

    def __init__(self, text: str, path: Path) -> None:
        self.commands, self.variables = list[list[str]](), dict[str, str | UserError]()
        self._path, self._size = path, 0
        lexer = shlex.shlex(_RAW.sub(_marked, text.replace("\r\n", "\n")), posix=True, punctuation_chars="();<>|&\n")
        lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
        statement: list[str] = []
        try:
            tokens = [part for each in lexer for part in (each if each and not each.strip("();<>|&\n") else [each])]
        except ValueError:
            raise self._refused("a quote that does not close") from None
        for token in [*tokens, "\n"]:
            if token in ("\n", ";") and statement.count("(") <= statement.count(")"):
                self._read(statement)
                statement = []
            elif token != "\n":
                statement.append(token)
        if statement:
            raise self._refused(" ".join(statement))

    def _refused(self, what: str) -> UserError:
        return UserError(
            f"{self._path}: {shortened(_shown(what), 60)} is not read, as only assignments, arrays and simple commands "
            "are; pass the arguments instead: put echo before the training command, and convert a text file with "
            "what it prints."
        )

    def _read(self, tokens: list[str]) -> None:
        """Read a statement: assignments, or a command after any."""
        if tokens and tokens[0] in ("export", "readonly", "declare"):
            tokens = list(dropwhile(lambda token: token.startswith("-"), tokens[1:]))
        while tokens and (assigned := re.match(r"([A-Za-z_]\w*)(\+?)=", tokens[0])):
            name, end = assigned[1], tokens.index(")") + 1 if tokens[1:2] == ["("] else 1
            items = tokens[2 : end - 1] if end > 1 else [tokens[0][assigned.end() :]]
            try:
                new = [self._expanded(item).replace(_BREAK, " ") for item in items]
                if end > 1:  # an item that is a flag may have its value in the same word
                    new = ["", *(item if item.startswith("--") else shlex.quote(item) for item in new)]
                self.variables[name] = (self._value(name) or "" if assigned[2] else "") + " ".join(new)
            except UserError as error:  # raised where the variable is used
                self.variables[name] = error
            tokens = tokens[end:]
        end = next((place for place, token in enumerate(tokens) if token in list("();<>|&")), len(tokens))
        words, rest = tokens[:end], tokens[end:]
        branches = rest[:1] in (["("], [")"], ["<"]) or rest[:2] in (["&", "&"], ["|", "|"])
        if branches or {*words[:1]} & {*_BRANCHING.split()} or any(token.startswith("--") for token in rest):
            raise self._refused(" ".join(tokens))
        try:
            given = [_shown(word) for token in words for word in self._expanded(token).split(_BREAK) if word]
        except UserError:  # such as mkdir "$(dirname $OUT)"
            if any(word.startswith("--") or word.endswith(".py") for word in words):
                raise
            return
        if any(re.search(r"\.py\s|\.sh$", word) for word in given) and not any(word.endswith(".py") for word in given):
            raise self._refused(" ".join(tokens))
        self.commands.append(given)

    def _expanded(self, token: str) -> str:
        """Return a token with the values of its variables."""

        def value(found: re.Match[str]) -> str:
            dollar, plain, braced, more = found.groups("")
            if not dollar:
                raise self._refused(token)
            items = self._value(plain or braced) or (more[2:] if more[:1] == ":" else None)
            self._size += len(items or "")
            if self._size > _MOST:
                raise UserError(f"{self._path}: its variables grow beyond {_MOST:,} characters.")
            divided = dollar == "$" or more[:1] == "["
            return found[0] if items is None else _BREAK.join(words_of(items)) if divided else items

        return _VARIABLE.sub(value, token)

    def _value(self, name: str) -> str | None:
        if isinstance(found := self.variables.get(name), UserError):
            raise found
        return found


def words_of(text: str) -> list[str]:
    """Divide a text at its spaces outside quotes."""
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe
        return text.split()


def _marked(found: re.Match[str]) -> str:
    """Return a part of a script for `shlex`, which then still knows which variables stand in quotes."""
    part = found[0]
    if part[0] == "#" or part == "\\\n" or part.isdecimal():
        return ""
    if part[0] in "\\'":
        return part.replace("\\$", _PLAIN).replace("$", _PLAIN)
    if part[0] == '"':
        return part.replace("\\\n", "").replace("\\$", _PLAIN).replace("$", _QUOTED)
    return shlex.quote(re.sub("['\"]", "", part) if part.startswith("${") else part.replace(" ", _SPACE))


def _shown(text: str) -> str:
    return text.replace(_PLAIN, "$").replace(_QUOTED, "$").replace(_SPACE, " ")


def launch_of(
    text: str,
    path: Path,
    switches: Collection[str] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
    several: Collection[str] = (),
) -> Launch:
    """Find the last training command of a script, or the flags of a text; raise a `UserError` if there is none.

    `switches` are flags without a value, so that words after them do not belong to them; the values of `several` flags,
    which may be repeated, are lists; `renamed` maps short options to flags.
    """
    script, notes = _Script(text, path), list[Unmapped]()
    trainings = [words for words in script.commands if _start(words)]
    trainings = [words for words in trainings if not _PREPARES.search(Path(words[_start(words) - 1]).name)] or trainings
    if len(trainings) > 1:
        notes.append(Unmapped("trainings", len(trainings), f"the last is taken, {shortened(' '.join(trainings[-1]))}"))
    words = trainings[-1] if trainings else [word for each in script.commands for word in each]
    if not any(word.startswith("--") for word in words) and not trainings:  # a script that only sets variables
        values = [words_of(_shown(value)) for value in script.variables.values() if isinstance(value, str)]
        words = [word for pieces in values if any(each.startswith("--") for each in pieces) for word in pieces]
    start = _start(words)
    before = [*" ".join(re.findall(r"^#SBATCH\s(.*)$", text, re.MULTILINE)).split(), *words[: max(0, start - 1)]]
    words, script_name = [renamed.get(word, word) for word in words[start:]], words[start - 1] if start else ""
    if not any(word.startswith("--") for word in (*words, *before)):
        raise UserError(
            f"{path} has no flags such as --num-layers 24, so it is not Megatron-LM's; name its system with --from."
        )
    flags, unread = _collected(words, switches, several)
    reason = "a variable that the file does not set; flags in it are not known"
    notes += [Unmapped(word, "not given", reason) for word in unread if word.startswith("$")]
    if starting := list(dict.fromkeys(word.partition("=")[0] for word in before if word.startswith("--"))):
        notes.append(Unmapped("launcher", " ".join(starting), "of these only the number of ranks counts"))
    world = str(flags.pop("world-size", None) or flags.pop("world_size", None) or _ranks(before, script.variables))
    number = int(world) if world.isdecimal() and len(world) < 10 else 0
    return Launch(script_name, flags, number or None, notes, [word for word in unread if not word.startswith("$")])


def _start(words: list[str]) -> int:
    """Return the index after the Python file or module of the training; 0 if there is none."""
    files = [place for place, word in enumerate(words, 1) if word.endswith(".py")]
    modules = [place for place, (one, two) in enumerate(pairwise(words), 2) if one == "-m" and "train" in two]
    return ([n for n in files if _TRAINS.search(Path(words[n - 1]).name)] or files or modules[-1:] or [0])[0]


def _collected(
    words: Iterable[str], switches: Collection[str], several: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return flags with their values, and the words that belong to no flag."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and word != "--":
            found.append((name, [value] if equals else []))
        else:
            found[-1][1].append(word)
    flags, unread = dict[str, Any](), found.pop(0)[1]
    for name, values in found:
        if name.replace("_", "-") in switches and values and values[0].lower() not in ("true", "false"):
            unread += values
            values = []
        if name in several:
            flags[name] = [*flags.get(name, []), *values]
        else:
            flags[name] = values if len(values) > 1 else values[0] if values else True
    return flags, unread


def _ranks(words: list[str], variables: Mapping[str, str | UserError]) -> str:
    """Return the number of ranks that the words before the training's file start; empty if it is not known."""
    options: dict[str, str] = {}
    for word, following in pairwise([*words, ""]):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            options[name.replace("_", "-")] = value if equals else following
    listed = next((options[name] for name in ("gpus", "devices") if "," in options.get(name, "")), None)
    if "paddle" in " ".join(words) and (listed or options.get("gpus", "").isdecimal()):
        return str(len(listed.split(","))) if listed else "1"
    nodes = options.get("nnodes", "")
    if not nodes.isdecimal():  # not given, or such as $SLURM_NNODES, which Slurm sets
        nodes = options.get("nodes") or options.get("N") or ("" if nodes else "1")
    local = options.get("nproc-per-node", options.get("ntasks-per-node"))
    if local is None and (total := options.get("ntasks") or options.get("n", "")).isdecimal():
        return total
    if local is not None and local.isdecimal() and nodes.isdecimal():
        return str(int(local) * int(nodes))
    world = variables.get("WORLD_SIZE", "")
    return world if isinstance(world, str) else ""
