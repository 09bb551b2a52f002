"""Error of a damaged checkpoint, and checks that its readers share."""

from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError


class DamagedCheckpoint(UserError):
    """Error for the folder of a damaged checkpoint, with the reason as a clause; an older one may still be valid."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"The checkpoint {path} cannot be used: {reason}.")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)


def whole(value: Any) -> int:
    """Return a whole number of at least 0; raise ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a whole number")
    return value


CHANGED: Final = "does not have the checksum that it was written with"
MODEL: Final = "model."
OPTIMIZER: Final = "optimizer."
AVERAGE: Final = "average."
