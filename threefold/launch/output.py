"""What a rank prints goes to its log, and from chosen ranks to the console also."""

import io
import os
import pty
import re
import select
import signal
import sys
import termios
import traceback
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from threefold.errors import OutputLost

_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
"""Colours, cursor movements and titles of a terminal."""
_LONGEST_LINE = 1 << 16


def log_file(run_dir: Path, rank: int) -> Path:
    """RUN/logs/rank_00000.log and so on."""
    return run_dir / "logs" / f"rank_{rank:05d}.log"


@contextmanager
def logged(log: Path) -> Iterator[None]:
    """Send this process's standard output and error, native code's included, to the end of `log`."""
    with _redirected(_append(log)):
        yield


@contextmanager
def logged_and_shown(log: Path, prefix: str = "") -> Iterator[None]:
    """As `logged`, and show them on standard output too; a terminal stays one, so that progress bars work.

    Args:
        prefix: begins each line on the console, for when several ranks share it (which then is no terminal).
    """
    target, finish = _tee(log, prefix)
    try:
        with _redirected(target):
            yield
    finally:
        finish()


@contextmanager
def _redirected(target: int) -> Iterator[None]:
    before = [os.dup(1), os.dup(2)]
    _replace_streams(target, target)
    os.close(target)
    try:
        yield
    finally:
        _replace_streams(*before)
        for descriptor in before:
            os.close(descriptor)


def _replace_streams(output: int, error: int) -> None:
    """Point descriptors 1 and 2 elsewhere, with Python streams on them that write whole lines at once."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, OutputLost):
            if stream is not None:  # as where the console was closed from the start
                stream.flush()
    os.dup2(output, 1)
    os.dup2(error, 2)
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(descriptor: int) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Tolerant(descriptor)), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


class _Tolerant(io.RawIOBase):
    """A descriptor to write to whose failures, such as those of a log on a full disk, end no run."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return len(memoryview(data))


def _append(log: Path) -> int:
    """A descriptor that appends to a log; where there can be none, to nothing."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    except OSError as error:
        _warn(2, log, error)
        return os.open(os.devnull, os.O_WRONLY)


def _warn(descriptor: int, log: Path, error: OSError) -> None:
    with suppress(OSError):
        os.write(
            descriptor, f"Warning: {log} cannot be written ({error.strerror}); the run continues without it.\n".encode()
        )


def _tee(log: Path, prefix: str) -> tuple[int, Callable[[], None]]:
    """A descriptor whose text a process of its own copies to standard output and to `log`, and how to wait for it.

    A process, not a thread, so that nothing is lost when this one is killed or crashes.
    """
    source, target = _terminal() if os.isatty(1) and not prefix else os.pipe()
    told, teller = os.pipe()
    copier = os.fork()
    if copier:
        os.close(source)
        os.close(told)
        return target, lambda: _finish(copier, teller)
    status = 1
    try:
        os.close(target)
        os.close(teller)
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # it ends when the last writer has
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        with open(_append(log), "ab", buffering=0) as file:
            _copy(source, told, _Log(log, file), prefix.encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _finish(copier: int, teller: int) -> None:
    """Tell the copier that nothing follows and wait; helpers of this process may keep the other descriptor open."""
    os.close(teller)
    with suppress(ChildProcessError):
        os.waitpid(copier, 0)


def _terminal() -> tuple[int, int]:
    """A terminal of the size of the one on standard output, that passes on what is written as it is."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    with suppress(termios.error, OSError):
        termios.tcsetwinsize(slave, termios.tcgetwinsize(1))
    return master, slave


class _Log:
    """A log that says once, on the console, that it cannot be written."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file, self._told = path, file, False

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            if not self._told:
                self._told = True
                _warn(1, self._path, error)


def _copy(source: int, told: int, log: _Log, prefix: bytes) -> None:
    pending = b""
    while source in select.select([source, told], [], [])[0] and (data := _read(source)):
        lines = (pending + data).split(b"\n")
        pending = lines.pop()
        if len(pending) > _LONGEST_LINE:  # a progress bar that draws over itself: only its last state matters
            pending = pending[max(pending.rfind(b"\r"), 0) :]
        if lines:
            log.write(b"".join(_plain(line) + b"\n" for line in lines))
        _show(b"".join(prefix + line + b"\n" for line in lines) if prefix else data)
    if pending:
        log.write(_plain(pending) + b"\n")
        _show(prefix + pending + b"\n" if prefix else b"")


def _read(source: int) -> bytes:
    try:
        return os.read(source, 1 << 16)
    except OSError:  # a terminal whose other side is closed
        return b""


def _show(data: bytes) -> None:
    """Write to the console; the log goes on when that is gone."""
    with suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def _plain(line: bytes) -> bytes:
    """A line as it looked in the end, without what only a terminal understands."""
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])
