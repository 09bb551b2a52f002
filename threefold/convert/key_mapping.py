"""Key mapping: takes the settings of another system one by one, and collects our settings and notes on those left over.

The last part evaluates constant Python expressions, in which such settings may be written, without running anything.
"""

import ast
import operator
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final, NamedTuple

from threefold.errors import UserError
from threefold.files import read_text

LARGEST_FILE = 4 << 20  # size limit of a script or config, in bytes
NOT_KNOWN = "unknown to this converter"


class Same(NamedTuple):
    """Foreign setting with an equivalent of ours; `kind` raises a ValueError that states the kind of value."""

    theirs: str
    ours: str
    kind: Callable[[Any], Any]
    default: Any = None  # the foreign one, if ours is another


class Unmapped(NamedTuple):
    """Foreign setting without an exact counterpart; `unsupported` if unknown, or if leaving it out matters."""

    key: str
    value: Any
    reason: str
    unsupported: bool = False


class KeyMapping:
    """Foreign settings that are not mapped yet, our settings so far by `section.key`, and notes."""

    def __init__(self, path: Path, given: Mapping[str, Any] | None = None, notes: Iterable[Unmapped] = ()) -> None:
        self.where = str(path)
        self.given = {key: value for key, value in (given or {}).items() if value is not None}
        self.notes = list(notes)
        self.spelled: dict[str, str] = {}  # key → its spelling in the file, if another
        self.settings: dict[str, Any] = {}

    def take(self, key: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
        """Remove `key` and return its value converted by `kind`, or the default; a rejected value is a `UserError`."""
        if key not in self.given:
            return default
        value = self.given.pop(key)
        if isinstance(value, str) and value.startswith("$") and kind not in (text, texts):
            self.note(key, value, "a variable that the file does not set; ignored", unsupported=True)
            return default
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            shown = shortened(repr(value))
            raise UserError(f"{self.where}: {self.spelled.get(key, key)} is {shown} but must be {error}.") from None

    def given_whole(self, key: str, default: int) -> int:
        """Return the value of `key` as a whole number without removing it, or the default."""
        value = self.given.get(key)
        return int(str(value)) if str(value).isdecimal() else default

    def put(self, key: str, value: Any) -> None:
        if value is not None:
            self.settings[key] = value

    def move(self, table: Iterable[Same]) -> None:
        for theirs, ours, kind, default in table:
            self.put(ours, self.take(theirs, kind, default))

    def note(self, key: str, value: Any, reason: str, unsupported: bool = False) -> None:
        self.notes.append(Unmapped(self.spelled.get(key, key), value, reason, unsupported))

    def rename(self, old: str, new: str) -> None:
        """Give a setting the name that is converted; messages keep the spelling of the file."""
        self.given[new] = self.given.pop(old)
        self.spelled[new] = self.spelled.pop(old, old)

    def leave_idle(self, keys: Iterable[str], reason: str) -> None:
        """Note settings that the other system does not read either, as long as another one is what it is."""
        for key in keys:
            if key in self.given:
                self.note(key, self.given.pop(key), reason)

    def replicas(self, world: int | None, others: int, where: str) -> int:
        """Return `world / others` replicas (a `UserError` if not whole), or 1 with a note if `world` is unknown."""
        if world is None:
            self.note(where, "not given", "parallel.dp is 1; set --world-size, the number of ranks, for another value")
            return 1
        if world % others:
            rule = f"must be a multiple of {others}, the ranks of one replica"
            nearest = max(1, round(world / others)) * others
            raise UserError(
                f"{self.where}: the world size is {world} but {rule}; use {nearest}, as with --world-size {nearest}."
            )
        return world // others

    def put_optimizer(self, name: str, key: str, value: Any) -> None:
        """Set `adam` or `sgd`, which in the other system apply weight decay to every weight through its gradient."""
        self.put("optimizer.name", name)
        if self.settings.get("optimizer.weight_decay"):
            rest = "optimizer.weight_decay is for weight matrices, not biases and norms"
            self.note(key, value, f"optimizer.name is {name}; {rest}")

    def put_activation(self, key: str, known: Mapping[str, str]) -> None:
        """Set the activation function of a GPT from a name, with or without a module, such as `nn.functional.gelu`."""
        name = self.take(key, text)
        if name is None:
            return
        if (ours := known.get(name.rpartition(".")[2])) is None:
            reason = f"no function that is known, such as {' or '.join(known)}; set model.activation"
            self.note(key, name, reason, unsupported=True)
        self.put("model.activation", ours)

    def put_zero(self, stage: int, key: str, value: Any) -> None:
        """Set ZeRO, if there are several replicas."""
        if self.settings.get("parallel.dp", 1) * self.settings.get("parallel.cp", 1) > 1:
            self.put("parallel.zero", stage)
        else:
            self.note(key, value, f"ZeRO needs dp > 1; set parallel.zero {stage} once parallel.dp is above 1")

    def put_chunks(self, chunks: int, key: str) -> None:
        """Set the stages per rank, if there is a pipeline."""
        if chunks > 1 and self.settings["parallel.pp"] > 1:
            self.settings.update({"parallel.schedule": "interleaved", "parallel.stage_chunks": chunks})
        elif chunks > 1:
            self.note(key, chunks, "several stages per rank need pp > 1")

    def take_sequence_parallel(self, key: str) -> None:
        if self.take(key, switch, False):
            if self.settings["parallel.tp"] > 1:
                self.put("parallel.sequence_parallel", True)
            else:
                self.note(key, True, "sequence parallelism needs tp > 1")

    def leave_rows(self, table: Iterable[Same], reason: str, unsupported: bool) -> None:
        for row in table:
            if row.theirs in self.given:
                self.note(row.theirs, self.given.pop(row.theirs), reason, unsupported)

    def leave(self, reasons: Mapping[str, str], unsupported: Mapping[str, str] | None = None) -> None:
        """Add a note for every remaining setting, with the reason whose patterns match it first."""

        def reason_of(key: str, table: Mapping[str, str]) -> str:
            found = (why for why, patterns in table.items() if any(fnmatchcase(key, each) for each in patterns.split()))
            return next(found, "")

        for key, value in self.given.items():
            changing, harmless = reason_of(key, unsupported or {}), reason_of(key, reasons)
            self.note(key, value, changing or harmless or NOT_KNOWN, unsupported=bool(changing or not harmless))
        self.given.clear()


def foreign_text(path: Path) -> str:
    """Read the text of a foreign file; raise a `UserError` if it is unreadable, too large, or not UTF-8."""
    return read_text(path, limit=LARGEST_FILE)


def shortened(text: str, longest: int = 200) -> str:
    """Format text for one line of a message, truncated if it is long."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def whole(value: Any) -> int:
    if number(value, "a whole number") % 1:
        raise ValueError("a whole number")
    return int(float(value)) if not isinstance(value, int) else value


def count(value: Any) -> int:
    if (result := whole(value)) < 1:
        raise ValueError("at least 1")
    return result


def number(value: Any, what: str = "a number") -> float:
    try:
        result = nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = nan
    if not isfinite(result):
        raise ValueError(what)
    return result


def switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError("true or false")


def text(value: Any) -> str:
    if isinstance(value, list | dict):
        raise ValueError("text")
    return str(value)


def texts(value: Any) -> list[str]:
    return [str(part) for part in value] if isinstance(value, list) else [text(value)]


def weights(value: Any) -> str:
    """Return the weights of the parts of the data as text; files have them as a list or as text."""
    return ",".join(map(str, value)) if isinstance(value, list) else text(value)


_KINDS: Final = {kind.__name__: kind for kind in (whole, count, number, switch, text, weights)}


def tables_of(system: str) -> dict[str, Any]:
    """Read the tables of a system from its TOML file in this folder; those under `rows` consist of `Same`."""
    given = tomllib.loads(Path(__file__).with_name(f"{system}.toml").read_text(encoding="utf-8"))
    for table in given["rows"].values():
        table[:] = [Same(theirs, ours, _KINDS[kind], *default) for theirs, ours, kind, *default in table]
    return given


MOST_SETTINGS = 20_000  # limit on the settings of a file


def flat(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flatten nested settings to dotted keys, at most `MOST_SETTINGS`; an empty section is a value."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [(str(key), value) for key, value in reversed(list(values.items()))]
    seen = 0
    while waiting:
        name, value = waiting.pop()
        seen += 1
        if seen > MOST_SETTINGS or name.count(".") > 100:
            raise UserError(f"{where} has more than {MOST_SETTINGS:,} settings, or sections that contain each other.")
        if isinstance(value, dict) and value:
            waiting += [(f"{name}.{key}", inner) for key, inner in reversed(list(value.items()))]
        else:
            found[name] = value
    return found


_LONGEST_LITERAL: Final = 1000
_LARGEST: Final = 10**18
_LARGEST_IN_POWER: Final = 64
_MOST_PARTS: Final = 10_000
"""Limit on the elements of a list or dict, including nested ones; a larger one stays source text."""
_OPERATORS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {"int": int, "float": float, "min": min, "max": max, "round": round}


def parsed(text: str, expression: bool = False) -> ast.AST:
    """Parse foreign Python code, which may be invalid or too deeply nested, without Python's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval" if expression else "exec")


def literal(value: Any) -> Any:
    """Return the value of text that is a Python number, True, False, None or a list of these; other text stays."""
    if not isinstance(value, str) or len(value) > _LONGEST_LITERAL:
        return value
    try:
        found = ast.literal_eval(parsed(value.strip(), expression=True))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return value
    parts = list(found) if isinstance(found, list | tuple) else [found]
    if not all(part is None or isinstance(part, str | int | float) for part in parts):
        return value
    return parts if isinstance(found, list | tuple) else found


def constant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate numbers, names, arithmetic, lists and `dict(…)`; anything else stays source text."""
    try:
        return _value(node, names)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return ast.unparse(node)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression; raise one of Python's errors if it is not constant or its value is too large."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            sides = [_number(side, names) for side in (left, right)]
            if isinstance(op, ast.Pow) and max(map(abs, sides)) > _LARGEST_IN_POWER:
                raise ValueError
            return _limited(_OPERATORS[type(op)](*sides))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
            return _limited(_FUNCTIONS[name](*(_number(part, names) for part in args)))
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return _bounded([constant(part, names) for part in parts])
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            found = zip((key.value for key in keys if isinstance(key, ast.Constant)), values, strict=True)
            return _bounded({str(key): constant(value, names) for key, value in found})
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords) if all(part.arg for part in keywords):
            return _bounded({str(part.arg): constant(part.value, names) for part in keywords})
        case ast.Subscript(value=container, slice=place):
            whole, key = constant(container, names), constant(place, names)
            if isinstance(whole, dict | list) and isinstance(key, str if isinstance(whole, dict) else int):
                return whole[key]  # type: ignore[index]  # the type of key goes with that of whole
    raise ValueError


def _number(node: ast.expr, names: Mapping[str, Any]) -> int | float:
    value = constant(node, names)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError


def _limited(result: Any) -> int | float:
    if isinstance(result, int | float) and abs(result) <= _LARGEST:
        return result
    raise ValueError


def _bounded(value: Any) -> Any:
    """Return a list or dict whose names do not expand to more than `_MOST_PARTS` elements."""
    waiting, count = [value], 0
    while waiting:
        part = waiting.pop()
        count += 1
        if count > _MOST_PARTS:
            raise ValueError
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return value
