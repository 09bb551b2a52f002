"""Sizes in bytes as text with a decimal unit, written and read."""

import re
from typing import Final

_UNITS: Final = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


def format_bytes(count: int, one: str = "bytes") -> str:
    """A size in the largest unit of which it is at least one, such as `1.5 MB`.

    Args:
        count: bytes.
        one: the unit of sizes below 1 kB.
    """
    for unit, scale in _UNITS.items():
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} {one}"


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `500MB`, `1.5 gb` or `4096`.

    Raises:
        ValueError: it is no such size, or zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", text.strip().upper())
    if not match or not float(match[1]):
        raise ValueError(f"{text!r} is not a size such as 500MB or 5GB")
    scales = {unit.upper(): scale for unit, scale in _UNITS.items()}
    return max(1, int(float(match[1]) * scales.get(match[2], 1)))
