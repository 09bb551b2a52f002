"""Errors that the user can correct, and words and numbers fit for messages."""

import re
from collections.abc import Iterable
from typing import Final


class UserError(Exception):
    """A mistake in a script, an option, a variable of the environment or a record, told in one sentence."""


def shown(text: object) -> str:
    """Return a path or a quoted text fit for a message: printable, and cut in the middle beyond 200 characters."""
    printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))
    return printable if len(printable) <= 200 else f"{printable[:120]}…{printable[-60:]}"


def first_of(names: Iterable[object], most: int = 5, of: str = "") -> str:
    """Return the first names as a list in text, with the number of the others, and what they are: `a, b and 3 more`."""
    every = [*map(str, names)]
    more = f" and {len(every) - most} more {of}".rstrip() if len(every) > most else ""
    return ", ".join(every[:most]) + more


def counted(count: int, thing: str) -> str:
    """Return a number of things, such as `1 rank` or `1,024 ranks`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


_UNITS: Final = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


def format_bytes(count: int) -> str:
    """Format a size in the largest decimal unit that it fills, such as `1.5 MB`."""
    return next((f"{count / scale:.1f} {unit}" for unit, scale in _UNITS.items() if count >= scale), f"{count} bytes")


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `500MB`, `1.5 gb` or `4096`; raise ValueError for other text, or zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", text.strip().upper())
    if not match or not float(match[1]):
        raise ValueError(f"{text!r} is not a size such as 500MB or 5GB")
    scales = {unit.upper(): scale for unit, scale in _UNITS.items()}
    return max(1, int(float(match[1]) * scales.get(match[2], 1)))
