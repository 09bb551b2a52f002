"""Options of commands that are whole numbers."""

from contextlib import suppress
from math import isfinite

from threefold.errors import UserError
from threefold.files import shown


def whole_number(text: str, option: str, least: int = 1, most: int = 10**7) -> int:
    """Parse an option as a whole number; raise a `UserError` if it is not one from `least` to `most`."""
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        nearest = least
        with suppress(ValueError):  # a text such as `1e3`, `1,024` or `7.9`
            meant = float(text.replace(",", ""))
            nearest = round(min(max(meant, least), most)) if isfinite(meant) else least
        raise UserError(f"{option} {shown(text) or repr(text)} must be a whole number; use {nearest}.") from None
    if number < least:
        raise UserError(f"{option} {number} must be at least {least}; use {least}.")
    if number > most:
        raise UserError(f"{option} {number} must be at most {most:,}; use {most}.")
    return number
