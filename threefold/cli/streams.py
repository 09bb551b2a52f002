"""Standard streams that may be closed or full, or without a reader."""

import errno
import io
import os
import sys
from typing import Any, TextIO

from threefold.errors import CLOSED_OUTPUT, OutputLost, UserError


def guard_streams() -> None:
    """Open closed standard streams on /dev/null, and raise `OutputLost` when standard output cannot be written.

    Otherwise the next file to be opened would reuse a closed descriptor, and output would go into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.stdout)


def read_standard_input() -> str:
    """Read all of standard input as UTF-8, whatever the locale; raise a `UserError` if it is not UTF-8."""
    source = getattr(sys.stdin, "buffer", None)
    if source is None:
        return sys.stdin.read()
    content: bytes = source.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Standard input is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); convert it first, "
            "for example with `iconv -f latin1 -t utf-8`."
        ) from None


def _guarded(stream: TextIO | None) -> TextIO:
    encoding, errors = ("utf-8", None) if stream is None else (stream.encoding, stream.errors)
    raw = _Output()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=raw.isatty())


class _Output(io.RawIOBase):
    """Descriptor 1; raises at the first failure and drops later output."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def isatty(self) -> bool:
        return os.isatty(1)

    def write(self, data: Any) -> int:
        if self._lost:
            return len(memoryview(data))
        try:
            return os.write(1, data)
        except OSError as error:
            self._lost = True
            if error.errno == errno.EPIPE:
                raise OutputLost(CLOSED_OUTPUT) from None
            raise OutputLost(f"Standard output cannot be written ({error.strerror}).") from None
