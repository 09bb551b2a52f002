"""Content of compressed files, for `threefold data prepare` and data of a run."""

import gzip
import io
import zlib
from typing import Any, Final

import zstandard

_CHUNK: Final = 1 << 18
_ZSTD_INPUT: Final = 1 << 12
"""Bytes that are decompressed at once; their content has at most 128 MiB."""


def decompressed(file: io.BufferedReader, ending: str) -> io.BufferedReader:
    """Return the content of a file that ends in `.gz` or `.zst`; a read raises EOFError or OSError if it is damaged."""
    return io.BufferedReader(_GzipFile(file) if ending == ".gz" else _ZstdFile(file), _CHUNK)


class _GzipFile(io.RawIOBase):
    """Content of a gzip file, whose damage is an OSError whatever part of it finds it."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = gzip.GzipFile(fileobj=file)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._file.readinto(buffer)
        except zlib.error as error:
            raise OSError(str(error)) from None


class _ZstdFile(io.RawIOBase):
    """Content of zstd frames; truncation is an error, which the library's `stream_reader` takes for the end."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self._input, self._output = file, b"", memoryview(b"")
        self._frame, self._in_frame = zstandard.ZstdDecompressor().decompressobj(), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(_ZSTD_INPUT)
            if not self._input:
                if self._in_frame:
                    raise EOFError("the zstd frame has no end")
                return 0
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            self._in_frame, self._input = not self._frame.eof, self._frame.unused_data
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
