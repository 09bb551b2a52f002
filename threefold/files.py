"""Files: safe reading of small ones, of text and of JSON; names and sizes fit for messages.

Every reader of configs, manifests, metadata and indexes goes through here, as they may be damaged. A missing file, a
folder, a FIFO, a device, wrong text and endlessly nested JSON each raise a one-sentence `UserError`; none hangs.
"""

import errno
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from threefold.errors import UserError

LARGEST_TEXT: Final = 256 << 20
"""Default limit, in bytes, for a file that is read into memory whole."""


_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.+)", re.DOTALL)
"""An address, such as `s3://bucket/run`; as a `Path`, it has lost a slash."""


def require_local(path: Path | str, called: str) -> None:
    """Raise `UserError` if a path is an address, such as `s3://bucket/tokens`; `called` begins the message."""
    if rule := local_rule(path):
        written = _ADDRESS.sub(lambda found: f"{found[1]}://{found[3]}", str(path))
        raise UserError(f"{called} is {shown(written)} but must be {rule}.")


def local_rule(path: Path | str) -> str:
    """Return the rule that an address breaks where files are read or written; empty for a path."""
    if (found := _ADDRESS.fullmatch(str(path))) is None or os.path.lexists(f"{found[1]}:"):
        return ""
    if found[1].lower() == "file":
        return f"a path without its protocol; use {shown(f'/{found[3]}')}"
    return (
        "a path on this machine (only checkpoint.remote takes an address); copy the files to a folder here, or mount "
        "them in one, and give its path"
    )


_HIDDEN: Final = "***"
_BEGINS: Final = r"([A-Za-z][A-Za-z0-9+.-]*:/+)"
_SECRETS: Final = (
    (re.compile(rf"{_BEGINS}[^\s/?#@]*:\S*@"), rf"\1{_HIDDEN}@"),  # user:password, up to the last @ of the word
    (re.compile(rf"{_BEGINS}[^\s/?#@]*:(?!\d+\b)[^\s@]*\s[^@]*@(?=\S)"), rf"\1{_HIDDEN}@"),  # with a space in it
    (re.compile(r"(https?:/+)[^\s/?#@]*@", re.IGNORECASE), rf"\1{_HIDDEN}@"),  # a token as the user
    (re.compile(rf"{_BEGINS}([^\s?#]*)(?:(\?)|(#)(?=\S*=))\S*?([\]\"'.,;:)}}]*)(?=\s|$)"), rf"\1\2\3\4{_HIDDEN}\5"),
)
"""Parts of addresses in a text that give access, and what is shown for each."""


def hide_secrets(text: str) -> str:
    """Return a text with `***` for each password, token and query (`?sig=…`) in its addresses.

    Whatever the package prints or writes that a setting, a file or another package's error may have put an address
    into goes through here; `shown` and `on_one_line` do it themselves.
    """
    if ":/" in text:
        for pattern, hidden in _SECRETS:
            text = pattern.sub(hidden, text)
    return text


def without_secrets(address: str) -> str:
    """Return an address without its password, token and query."""
    return re.sub(rf"{re.escape(_HIDDEN)}@|[?#]{re.escape(_HIDDEN)}", "", hide_secrets(address))


def require_file(path: Path, called: str = "") -> int:
    """Return the size in bytes of a regular file, following links; a FIFO or a device is refused without opening it.

    `called` is a noun put before the path in messages, with a trailing space, such as "the config ".
    """
    with _explained(path, called):
        return _regular(os.stat(path)).st_size


def no_file(mode: int) -> str:
    """Return why a file of this mode is not read, as a clause; empty for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return f"it is {'a folder' if stat.S_ISDIR(mode) else 'no regular file (a pipe, socket or device)'}; give a file"


def open_regular(path: Path, flags: int = 0) -> io.FileIO:
    """Open a regular file for reading, unbuffered; raise OSError for anything else, and wait for nothing."""
    _regular(os.stat(path))  # before it is opened, which a device might notice
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags))
    try:
        _regular(os.fstat(file.fileno()))  # of what was opened, should another have taken its name
    except OSError:
        file.close()
        raise
    return file


def _regular(found: os.stat_result) -> os.stat_result:
    if problem := no_file(found.st_mode):
        raise OSError(errno.EINVAL, problem)
    return found


@contextmanager
def _explained(path: Path, called: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        require_local(path, f"T{called[1:-1]}" if called.startswith("the ") else "A file")
        raise UserError(f"Cannot read {called}{shown(path)}: {error.strerror}.") from None
    except ValueError:  # a NUL in the name
        raise UserError(f"Cannot read {called}{shown(path)}: its name holds a NUL character.") from None


def read_bytes(path: Path, called: str = "", limit: int = LARGEST_TEXT) -> bytes:
    """Return the content of a regular file; raise UserError if it is unreadable or larger than `limit` bytes."""
    with _explained(path, called), open_regular(path) as file:
        return content_of(file, path, called, limit)


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first bytes of a regular file, by which its format is told; nothing if they cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        return file.read(size)
    return b""


def content_of(file: io.FileIO, path: Path, called: str, limit: int) -> bytes:
    """Return what an open file holds; raise UserError, naming its path, if that is more than `limit` bytes."""
    if (size := os.fstat(file.fileno()).st_size) > limit:
        raise UserError(f"Cannot read {called}{shown(path)}: it holds {size:,} bytes and {limit:,} are allowed.")
    return file.readall()


def read_text(path: Path, called: str = "", limit: int = LARGEST_TEXT) -> str:
    """Return the text of a UTF-8 file without its byte order mark; raise UserError if it is unreadable or too large."""
    return text_of(path, read_bytes(path, called, limit), called)


def text_of(path: Path, content: bytes, called: str = "") -> str:
    """Return UTF-8 text without its byte order mark; raise UserError, naming the path of its file, if it is none."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        name = f"{called[:1].upper()}{called[1:]}{shown(path)}"
        raise UserError(f"{name} is not UTF-8 text (byte {error.start}).") from None


def read_json(path: Path, called: str = "", limit: int = LARGEST_TEXT, finite: bool = True) -> Any:
    """Return the value in a JSON file; raise UserError if `read_text` or `parse_json` does."""
    return parse_json(read_text(path, called, limit), f"{called}{shown(path)}", finite)


DEEPEST: Final = 100
"""Levels of lists and objects in JSON: what reads the values goes down one call, or several, for each."""


def load_json(text: str | bytes, constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is invalid, or nested deeper than `DEEPEST`.

    `constant` gives the values of NaN and infinities, which JSON lacks; without it they are floats.
    """
    try:
        value = json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > DEEPEST:  # type: ignore[arg-type]
        level = [value]
        for _ in range(DEEPEST):
            level = [each for one in level if isinstance(one, dict | list) for each in _members(one)]
        if any(isinstance(each, dict | list) for each in level):
            raise ValueError(_TOO_DEEP)
    return value


_TOO_DEEP: Final = "its JSON is nested too deeply"


def _members(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def parse_json(text: str, where: str, finite: bool = True) -> Any:
    """Parse a JSON text named `where` in messages; NaN and infinities, which JSON lacks, are refused if `finite`."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return load_json(text, refuse if finite else None)
    except json.JSONDecodeError as error:
        raise UserError(
            f"Cannot read {where}: it is not JSON ({error.msg}, line {error.lineno} column {error.colno})."
        ) from None
    except ValueError as error:  # a number of more digits than Python reads; NaN; endless nesting
        raise UserError(f"Cannot read {where}: {error}.") from None


STRICT: Final = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""Pydantic's settings for a dataclass that `parse_facts` makes of JSON values: its `__pydantic_config__`."""

T = TypeVar("T")


class WrongFact(ValueError):
    """A member of a JSON object is missing, unknown or has an impossible value, as the message says in a clause."""

    def __init__(self, name: str, values: Mapping[str, Any], problem: str = "") -> None:
        value = shown(json.dumps(values.get(name), default=repr))
        what = {"missing": f"it has no {name}", "unexpected_keyword_argument": f"it has an unknown {shown(name)}"}
        super().__init__(what.get(problem, f"its {name} is {value}"))
        self.name = name


def parse_facts(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass of the members of a JSON object, checked against its annotations; lists become tuples.

    Raises `WrongFact` for the first member that does not fit.
    """
    from pydantic import ValidationError

    try:
        found: T = _adapter(kind).validate_json(json.dumps(values))  # type: ignore[arg-type]
        return found
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        name, *inside = first["loc"] or ("members",)
        raise WrongFact(str(name), values, "" if inside else first["type"]) from None


@cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def of_user(folder: Callable[[], Path]) -> Path | None:
    """Return a folder below the user's home; None if there is no home: neither HOME nor an entry in passwd."""
    with suppress(RuntimeError):
        found = folder()
        return None if found.parts[:1] == ("~",) else found
    return None


def shown(path: Path | str) -> str:
    """Return a path fit for a message: printable, without secrets, and cut in the middle beyond 200 characters."""
    text = _printable(hide_secrets(str(path)))
    return text if len(text) <= 200 else f"{text[:120]}…{text[-60:]}"


def on_one_line(message: str) -> str:
    """Return a message fit for a terminal, whatever it quotes: one printable line, its words and addresses as `shown`.

    A name may hold line ends or escape sequences, and be as long as a command line may be.
    """
    return re.sub(r"\S{400,}", lambda word: shown(word[0]), _printable(hide_secrets(message)))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def first_of(names: Iterable[object], most: int = 5, of: str = "", separator: str = ", ") -> str:
    """Return the first names as a list in text, with the number of the others, and what they are: `a, b and 3 more`."""
    every = [*map(str, names)]
    more = f" and {len(every) - most} more {of}".rstrip() if len(every) > most else ""
    return separator.join(every[:most]) + more


def describe_error(error: Exception) -> str:
    """Return the type and the message of an error in a user's code, on one line and without its full stop."""
    return hide_secrets(" ".join(f"{type(error).__name__}: {error}".split())).removesuffix(".")


_UNITS: Final = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


def counted(count: int, thing: str, plural: str = "s") -> str:
    """Return a number of things, such as `1 rank` or `1,024 ranks`."""
    return f"{count:,} {thing}{plural if count != 1 else ''}"


def how_often(times: float) -> str:
    """Return a number of times in words with at most one decimal, such as `once`, `2.1 times` or `3 times`."""
    if 0 < times < 0.05:
        return "less than 0.1 times"
    rounded = f"{times:,.1f}".removesuffix(".0")
    return "once" if rounded == "1" else f"{rounded} times"


def format_bytes(count: int, one: str = "bytes") -> str:
    """Format a size in the largest decimal unit that it fills, such as `1.5 MB`, or in the unit `one` below 1 kB."""
    for unit, scale in _UNITS.items():
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} {one}"


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `500MB`, `1.5 gb` or `4096`; raise ValueError for other text, or zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", text.strip().upper())
    if not match or not float(match[1]):
        raise ValueError(f"{text!r} is not a size such as 500MB or 5GB")
    scales = {unit.upper(): scale for unit, scale in _UNITS.items()}
    return max(1, int(float(match[1]) * scales.get(match[2], 1)))
