"""Progress reports of long work on text or tokens."""

from typing import Final, Protocol


class Progress(Protocol):
    """Receives progress, to show it."""

    def phase(self, name: str, total_bytes: int) -> None:
        """A new phase begins, which reads `total_bytes` of input."""

    def advance(self, read_bytes: int) -> None:
        """So many bytes more have been read."""


class _Silent:
    def phase(self, name: str, total_bytes: int) -> None:
        pass

    def advance(self, read_bytes: int) -> None:
        pass


SILENT: Final[Progress] = _Silent()
"""Shows nothing."""
