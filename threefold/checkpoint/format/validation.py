"""Validation of values in the JSON files of a checkpoint."""

from typing import Any


def is_plain_name(name: Any) -> bool:
    """Whether a name is that of a file in a folder itself: none of another folder, none that is absolute."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def whole(value: Any) -> int:
    """A whole number from 0 on.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no whole number")
    return value
