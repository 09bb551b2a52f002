"""Numbers of options, refused in one sentence that names the option."""

from math import isfinite
from typing import Final

from threefold.errors import UserError
from threefold.files import shown

_LONGEST: Final = 10**9
"""Ms of a pass, 11 days."""


def whole_number(text: str, option: str, least: int = 1, most: int = 10**7) -> int:
    """A whole number of an option.

    Raises:
        UserError: it is none, or is below `least` or above `most`.
    """
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        nearest = _nearest(text, least, most)
        raise UserError(f"{option} {shown(text) or repr(text)} must be a whole number; use {nearest}.") from None
    if number < least:
        raise UserError(f"{option} {number} must be at least {least}; use {least}.")
    if number > most:
        raise UserError(f"{option} {number} must be at most {most:,}; use {most}.")
    return number


def _nearest(text: str, least: int, most: int) -> int:
    """The whole number from `least` to `most` next to what a text means, such as `1e3`, `1,024` or `7.9`."""
    try:
        meant = float(text.replace(",", ""))
    except ValueError:
        return least
    return round(min(max(meant, least), most)) if isfinite(meant) else least


def times(text: str, option: str) -> list[float]:
    """One time, or several between commas.

    Raises:
        UserError: one is no number, infinite or negative.
    """
    found = []
    for part in text.split(","):
        try:
            time = float(part)
        except ValueError:
            rule = "must be a time in ms, or several between commas, such as 18.5 or 18.5,20,18.5"
            raise UserError(f"{option} {shown(text)} {rule}.") from None
        if not isfinite(time) or time < 0:
            raise UserError(f"{option} {part.strip()} must be a time of 0 ms or more; use 0.")
        if time > _LONGEST:
            raise UserError(f"{option} {part.strip()} must be a time of at most {_LONGEST:,} ms; use {_LONGEST}.")
        found.append(time)
    return found
