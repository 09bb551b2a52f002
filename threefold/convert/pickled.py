"""Pickles read as data: no class is imported and nothing is called, so that a hostile file can do nothing.

A pickle is a program for a stack machine. `read` runs it on values alone: a global becomes a `Name`, and a call of one
a `Call` with its arguments. Readers of files then look for the few calls that they know, such as those of tensors.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

LARGEST: Final = 512 << 20
"""Limit in bytes of a pickle, which holds no tensors: a hundred times that of the largest models."""


class NotData(ValueError):
    """Error of a pickle that is damaged or asks for something that this reader does not know, with a clause."""


@dataclass(frozen=True)
class Name:
    """Global that a pickle names."""

    name: str  # module and qualified name, joined by a dot


@dataclass(frozen=True)
class Reference:
    """Object outside of the pickle, such as the storage of a tensor."""

    key: Any


@dataclass(eq=False)
class Call:
    """Call that a pickle asks for, which is not made: of `name` with `args`; `state` is what it would then be given."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)  # that would then be added, pairs for a mapping

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of an object with a plain state; for slots, the second of the two."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        return state if isinstance(state, dict) else {}


_MAPPINGS: Final = ("collections.OrderedDict", "collections.defaultdict", "builtins.dict", "__builtin__.dict")
_SETS: Final = ("builtins.set", "builtins.frozenset", "__builtin__.set", "__builtin__.frozenset")
_MARK: Final = object()
_PLAIN: Final = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
"""Opcodes that push their argument."""
_HARMFUL: Final = frozenset(
    (
        *("os", "posix", "nt", "subprocess", "sys", "runpy", "shutil", "importlib", "pty", "ctypes", "code", "socket"),
        *("webbrowser", "pickle", "marshal", "tempfile", "multiprocessing", "asyncio", "http", "urllib"),
    )
)
_HARMFUL_BUILTINS: Final = frozenset(("eval", "exec", "compile", "__import__", "open", "input", "breakpoint"))
"""Modules and functions that run programs or reach files, which no checkpoint needs: a file that names one is refused.
Nothing of a pickle is run in any case."""
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Final[dict[str, Callable[[], Any]]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "EMPTY_TUPLE": tuple,
}


def read(data: bytes | bytearray) -> Any:
    """Return the value of a pickle; raise `NotData` for one that is damaged, too large or uses what data do not."""
    if len(data) > LARGEST:
        raise NotData(f"it has a pickle of {len(data):,} bytes and {LARGEST:,} are allowed")
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(bytes(data)):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except NotData:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    raise NotData("its pickle is damaged")


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _PLAIN:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self._take(int(name[-1]), tuple)
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            found = self._marked()
            stack.append({"TUPLE": tuple, "LIST": list, "FROZENSET": frozenset}[name](found))
        elif name == "DICT":
            found = self._marked()
            stack.append(dict(zip(found[::2], found[1::2], strict=True)))
        elif name in ("APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS"):
            self._add(name)
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            self._marked()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "GLOBAL":
            stack.append(_named(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            module, named = self._last(2)
            stack.append(_named(module, named))
        elif name in ("REDUCE", "NEWOBJ"):
            made, args = self._last(2)
            stack.append(_call(made, args))
        elif name == "NEWOBJ_EX":
            made, args, keywords = self._last(3)
            stack.append(_call(made, args if not keywords else (*args, keywords)))
        elif name in ("BINPERSID", "PERSID"):
            stack.append(Reference(argument if name == "PERSID" else stack.pop()))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Call):
                stack[-1].state = state
        else:
            raise NotData(f"its pickle has a {name.lower()}, which data do not need")

    def _last(self, count: int) -> list[Any]:
        found = self.stack[-count:]
        if len(found) < count or any(each is _MARK for each in found):
            raise NotData("its pickle is damaged")
        del self.stack[-count:]
        return found

    def _take(self, count: int, kind: Callable[[list[Any]], Any]) -> None:
        self.stack.append(kind(self._last(count)))

    def _marked(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise NotData("its pickle is damaged")
        found = self.stack[place + 1 :]
        del self.stack[place:]
        return found

    def _add(self, name: str) -> None:
        found = self._last({"APPEND": 1, "SETITEM": 2}[name]) if name in ("APPEND", "SETITEM") else self._marked()
        held = self.stack[-1]
        if isinstance(held, Call):
            held.items += found
        elif name.startswith("SETITEM"):
            held.update(zip(found[::2], found[1::2], strict=True))
        elif name == "ADDITEMS":
            held.update(found)
        else:
            held.extend(found)


def _named(module: str, name: str) -> Name:
    root = module.partition(".")[0]
    if root in _HARMFUL or (root in ("builtins", "__builtin__") and name in _HARMFUL_BUILTINS):
        raise NotData(f"its pickle would call {module}.{name}, as a harmful file does (nothing of it was run)")
    return Name(f"{module}.{name}")


def _call(made: Any, args: Any) -> Any:
    """Return what a call makes if that is a plain collection, else the call itself."""
    if not isinstance(made, Name) or not isinstance(args, tuple):
        raise NotData("its pickle calls something that is no name")
    if made.name in _MAPPINGS:
        pairs = args[-1] if args and isinstance(args[-1], list | dict) else ()
        return dict(pairs)
    if made.name in _SETS:
        return set(args[0]) if args else set()
    if made.name == "_codecs.encode" and args and isinstance(args[0], str):
        return args[0].encode("latin1")
    return Call(made.name, args)
