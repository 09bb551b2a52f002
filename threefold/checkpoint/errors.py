"""What is wrong with a checkpoint that cannot be used."""

from pathlib import Path
from typing import Any

from threefold.errors import UserError


class DamagedCheckpoint(UserError):
    """A checkpoint is not as it was written, or not one of Threefold's; an older one may still be good.

    Attributes:
        path: its folder.
        reason: what is wrong, as a clause that names the file.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"The checkpoint {path} cannot be used: {reason}.")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)
