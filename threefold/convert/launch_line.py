"""Training command of a launch script: its flags, and the number of ranks."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from threefold.convert.key_mapping import Unmapped
from threefold.convert.shell import Command, Script
from threefold.errors import UserError

_TRAINS: Final = re.compile(r"train|finetune|gpt|llama|mixtral|run_", re.IGNORECASE)
_PREPARES: Final = re.compile(r"preprocess|convert|merge|tokenize|download|generat|evaluat|export", re.IGNORECASE)
_UNSET: Final = re.compile(r"\$(?:\{[^}]*\}|\([^)]*\)|[A-Za-z_]\w*|[0-9@*#?!])|`[^`]*`")
_PIECE: Final = re.compile(r"(?:<[A-Za-z][^<>]*>|'[^']*'|\"[^\"]*\"|\S)+")
"""Part of a flag and its value written as one quoted word, as is common in arrays."""
_VARIABLE: Final = re.compile(r"\$\{?([A-Za-z_]\w*|\d+)")


class Launch(NamedTuple):
    """Training command of a script."""

    script: str  # Python file or module; empty if the text has only flags
    flags: dict[str, Any]  # without dashes → True, a text or a list of texts; one with `$` is not set in the file
    world: int | None  # number of ranks, if it is given
    notes: list[Unmapped]
    unread: list[str]  # words that belong to no flag


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
    script = Script(text, path)
    notes = [Unmapped(f"line {line}, {what}", "a branch", reason) for line, what, reason in script.remarks]
    command = _training(script, notes)
    words = command.words if command else [word for each in script.commands for word in each.words]
    if not command and not any(word.startswith("--") for word in words):  # a script that only sets variables
        values = ([piece for item in items for piece in item.split()] for items in script.scope.variables.values())
        words = [word for pieces in values if any(each.startswith("--") for each in pieces) for word in pieces]
    place = _start(words)
    given = [renamed.get(word, word) for word in words[place:]]
    if script.missing:
        line, name = script.missing[0]
        used = [word for word in given if (found := _VARIABLE.search(word)) and not found[1].isdecimal()]
        if used or not any(word.startswith("--") for word in given):
            needs = f"{used[0]} is used and nothing else sets it" if used else "no flags are found without it"
            raise UserError(
                f"{path}, line {line}: it reads {name}, which does not exist, and {needs}; put the file there."
            )
    if not any(word.startswith("--") for word in (*words, *given)):
        raise UserError(
            f"{path} has no flags such as --num-layers 24, so it is not Megatron-LM's; name its system with --from."
        )
    flags, unread = _collected(given, switches, several)
    launcher = words[: max(0, place - 1)]
    batch = command.batch if command else []
    for word in [word for word in unread if _UNSET.fullmatch(word)]:
        unread.remove(word)
        notes.append(Unmapped(word, "not given", "a variable that the file does not set; flags in it are not known"))
    for line, name in script.missing:
        notes.append(Unmapped(name, "not given", f"line {line} reads this file, which does not exist"))
    if starting := list(dict.fromkeys(word.partition("=")[0] for word in (*batch, *launcher) if word.startswith("--"))):
        notes.append(Unmapped("launcher", " ".join(starting), "of these only the number of ranks counts"))
    world = flags.pop("world-size", None) or flags.pop("world_size", None) or _ranks(launcher, batch, script)
    number = int(str(world)) if str(world).isdecimal() and len(str(world)) < 10 else 0
    return Launch(words[place - 1] if place else "", flags, number or None, notes, unread)


def _training(script: Script, notes: list[Unmapped]) -> Command | None:
    started = [command for command in script.commands if _start(command.words)]
    trainings = [command for command in started if not _PREPARES.search(_file(command).name)] or started
    named = [command for command in trainings if _TRAINS.search(_file(command).name)] or trainings
    if len(named) > 1:
        others = ", ".join(f"line {command.line}" for command in named[:-1])
        reason = f"that of line {named[-1].line} is taken; the file starts {others} too"
        notes.append(Unmapped("trainings", len(named), reason))
    return named[-1] if named else None


def _file(command: Command) -> Path:
    return Path(command.words[_start(command.words) - 1])


def _start(words: list[str]) -> int:
    """Return the index after the Python file of the training; 0 if there is none."""
    files = [place for place, word in enumerate(words) if word.endswith(".py")]
    named = [place for place in files if _TRAINS.search(Path(words[place]).name)]
    if files:
        return (named or files)[0] + 1 if len(named) != 1 else named[0] + 1
    modules = [place for place, word in enumerate(words[1:], 1) if words[place - 1] == "-m" and "train" in word]
    return modules[-1] + 1 if modules else 0


def _collected(
    words: list[str], switches: Collection[str], several: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return flags with their values, and the words that belong to no flag."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in [piece for each in words for piece in (_PIECE.findall(each) if each.startswith("--") else [each])]:
        if word.startswith("--") and word != "--":
            name, equals, value = word[2:].partition("=")
            found.append((name, [_unquoted(value)] if equals else []))
        else:
            found[-1][1].append(_unquoted(word))
    flags: dict[str, Any] = {}
    unread = found.pop(0)[1]
    for name, values in found:
        if name.replace("_", "-") in switches and values and values[0].lower() not in ("true", "false"):
            unread += values
            values = []
        if name in several:
            flags[name] = [*flags.get(name, []), *values]
        else:
            flags[name] = True if not values else values[0] if len(values) == 1 else values
    return flags, unread


def _unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _ranks(launcher: list[str], batch: list[str], script: Script) -> Any:
    options = dict(_options([*batch, *launcher]))
    nodes = options.get("nnodes") or options.get("nodes") or options.get("N") or "1"
    local = options.get("nproc-per-node")
    listed = next((options[name] for name in ("gpus", "devices") if "," in options.get(name, "")), None)
    if "paddle" in " ".join(launcher) and (listed or options.get("gpus", "").isdecimal()):
        return len(listed.split(",")) if listed else 1
    if not nodes.isdecimal():  # such as $SLURM_NNODES, which Slurm sets
        nodes = options.get("nodes") or options.get("N") or ""
    if local is None:
        local = options.get("ntasks-per-node")
        if local is None and (options.get("ntasks") or options.get("n", "")).isdecimal():
            return options.get("ntasks") or options["n"]
    if local is not None and local.isdecimal() and nodes.isdecimal():
        return str(int(local) * int(nodes))
    return "".join(script.scope.variables.get("WORLD_SIZE", [])[:1]) or None


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            yield name.replace("_", "-"), value if equals else following
