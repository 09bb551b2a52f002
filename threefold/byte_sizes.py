"""Format and parse sizes in bytes with decimal units."""

import re
from typing import Final

_UNITS: Final = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


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
