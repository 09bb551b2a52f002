"""The error of a damaged checkpoint."""

from pathlib import Path
from typing import Any

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
