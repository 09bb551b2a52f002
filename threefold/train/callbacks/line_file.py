"""A text file that is written line by line; a write error does not end the training."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from threefold.output.links import replace_link

LARGEST_BACKLOG = 1 << 20
"""Bytes of lines that are kept in memory until a full disk has space again."""


class LineFile:
    """Appends whole lines; the first failure is reported once, and writing is retried with each line.

    A line that a full disk cut short is truncated before the next one is written, so that the file never has half a
    line in its middle.

    Args:
        path: of the file.
        say: prints the warning about a failure.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._descriptor: int | None = None
        self._size: int | None = None
        self._backlog: list[bytes] = []
        self._reported = False

    def open(self, *, append: bool) -> None:
        """Open the file, emptied unless `append`."""
        with self._failures_reported():
            self._open(append)

    def write(self, line: str) -> None:
        """Append `line`, after the lines that could not be written before it."""
        self._backlog.append(f"{line}\n".encode())
        while len(self._backlog) > 1 and sum(map(len, self._backlog)) > LARGEST_BACKLOG:
            del self._backlog[0]
        with self._failures_reported():
            if self._descriptor is None:
                self._open(append=True)
            while self._backlog:
                self._append(self._backlog[0])
                del self._backlog[0]

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self, append: bool) -> None:
        # Non-blocking, or a FIFO of this name would block the run.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | (0 if append else os.O_TRUNC)
        self._descriptor = os.open(replace_link(self.path), flags, 0o644)
        found = os.fstat(self._descriptor)
        self._size = found.st_size if stat.S_ISREG(found.st_mode) else None

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            if self._size is not None:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            raise
        if self._size is not None:
            self._size += len(data)

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._reported:
                self._reported = True
                self._say(f"Warning: {self.path} cannot be written ({error.strerror}); training continues without it.")


def reason_of(error: Exception) -> str:
    """An exception's message on one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())
