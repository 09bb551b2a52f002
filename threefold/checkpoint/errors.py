"""The error of a damaged checkpoint."""

from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError


class DamagedCheckpoint(UserError):
    """A checkpoint is damaged or not one of Threefold's; an older one may still be valid.

    Attributes:
        path: its folder.
        reason: what is wrong, as a clause that names the file.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"The checkpoint {path} cannot be used: {reason}.")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)


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


MODEL: Final = "model."
OPTIMIZER: Final = "optimizer."
