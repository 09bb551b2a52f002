"""Reading files that a person or another program may have damaged, without hanging and without a traceback.

Every reader of small files (configs, manifests, metadata, indexes) goes through here, so that a missing file, a folder,
a FIFO, a device, a path of 5,000 characters, text that is not UTF-8 and JSON nested without end are each one sentence.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError

LARGEST_TEXT: Final = 256 << 20
"""Bytes of the largest file that is read into memory whole, unless a caller says otherwise."""


def require_file(path: Path, called: str = "") -> int:
    """Check that `path` is a regular file, and return its size in bytes; a FIFO or a device is refused, not opened.

    Args:
        path: the file; links are followed.
        called: a noun before its name in a sentence, with a space after it, such as "the config ".

    Raises:
        UserError: it does not exist, is no regular file, or its name cannot be that of a file.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise UserError(f"Cannot read {called}{shown(path)}: {error.strerror}.") from None
    except ValueError:  # a NUL in the name
        raise UserError(f"Cannot read {called}{shown(path)}: its name holds a NUL character.") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file (a pipe, socket or device)"
        raise UserError(f"Cannot read {called}{shown(path)}: it is {kind}; give a file.")
    return found.st_size


def read_bytes(path: Path, called: str = "", limit: int = LARGEST_TEXT) -> bytes:
    """The content of a regular file.

    Raises:
        UserError: it cannot be read, or is larger than `limit` bytes.
    """
    size = require_file(path, called)
    if size > limit:
        raise UserError(f"Cannot read {called}{shown(path)}: it holds {size:,} bytes and {limit:,} are allowed.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read {called}{shown(path)}: {error.strerror}.") from None


def read_text(path: Path, called: str = "", limit: int = LARGEST_TEXT) -> str:
    """The text of a regular UTF-8 file; a byte order mark is dropped.

    Raises:
        UserError: it cannot be read, is larger than `limit` bytes, or is not UTF-8.
    """
    content = read_bytes(path, called, limit)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        name = f"{called[:1].upper()}{called[1:]}{shown(path)}"
        raise UserError(f"{name} is not UTF-8 text (byte {error.start}).") from None


def read_json(path: Path, called: str = "", limit: int = LARGEST_TEXT) -> Any:
    """The value in a JSON file.

    Raises:
        UserError: as `read_text`, or the text is not JSON, or is nested too deeply, or has a number too long to read.
    """
    return parse_json(read_text(path, called, limit), f"{called}{shown(path)}")


def parse_json(text: str, where: str) -> Any:
    """The value that a JSON text spells; NaN and infinities, which JSON does not have, are refused.

    Args:
        text: the JSON.
        where: names the text in a sentence.

    Raises:
        UserError: it is not JSON, is nested too deeply, or has a number too long to read.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise UserError(
            f"Cannot read {where}: it is not JSON ({error.msg}, line {error.lineno} column {error.colno})."
        ) from None
    except RecursionError:
        raise UserError(f"Cannot read {where}: its JSON is nested too deeply.") from None
    except ValueError as error:  # a number of more digits than Python reads; NaN
        raise UserError(f"Cannot read {where}: {error}.") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def shown(path: Path | str) -> str:
    """A path as a sentence may show it: printable, and cut in its middle where it is longer than 200 characters."""
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(path))
    return text if len(text) <= 200 else f"{text[:120]}…{text[-60:]}"
