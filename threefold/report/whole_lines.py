"""Whole lines of ranks that print to one console."""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from threefold.errors import OutputLost
from threefold.launch.output import alone


@contextmanager
def whole_lines() -> Iterator[None]:
    """Show what this process prints in whole lines within the block, as other ranks print to the same console."""
    before = sys.stdout, sys.stderr
    streams = [each if each is None else _WholeLines(each) for each in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            if stream is not None:
                stream.end()


class _WholeLines:
    """Text stream that passes text on when its line ends, and holds the rest of a line until then.

    A piece that begins with a carriage return is passed on at once, as progress bars end no line. Other attributes are
    those of the stream below, which may be a notebook's.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._held, self._lock, self._pid = stream, "", threading.RLock(), os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:  # a fork, such as a worker of a data loader: the held piece is its parent's
            self._held, self._lock, self._pid = "", threading.RLock(), os.getpid()
        with self._lock:
            lines, end, rest = (self._held + text).rpartition("\n")
            self._held = "" if rest.startswith("\r") else rest
            if shown := lines + end + (rest if rest.startswith("\r") else ""):
                self._show(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._stream.flush()

    def end(self) -> None:
        """Pass on a line without an end."""
        with self._lock, suppress(OSError, ValueError, OutputLost):
            held, self._held = self._held, ""
            if held:
                self._show(held)

    def _show(self, text: str) -> None:
        descriptor = -1
        with suppress(AttributeError, OSError, ValueError):  # io.UnsupportedOperation is both
            descriptor = self._stream.fileno()
        with alone(descriptor):
            self._stream.write(text)
            self._stream.flush()
