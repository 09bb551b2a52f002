"""Redirect the output of ranks to log files, and show that of chosen ranks on the console too, in whole lines."""

import fcntl
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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from threefold.errors import OutputLost
from threefold.foreign import nofollow_folder, open_nofollow

_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
"""ANSI escape sequences: colours, cursor movements and titles."""


def log_file(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's log, such as RUN/logs/rank_00000.log."""
    return run_dir / "logs" / f"rank_{rank:05d}.log"


def failure_file(run_dir: Path) -> Path:
    """Return the path of the file into which a launcher's rank writes the failure that it reports."""
    return run_dir / "logs" / "failure"


def logged(log: Path) -> AbstractContextManager[None]:
    """Append this process's standard output and error, native code's included, to `log` within the block."""
    return _redirected(_append(log))


@contextmanager
def logged_and_shown(log: Path, prefix: str = "") -> Iterator[None]:
    """Append output to `log` and also show it on standard output; a terminal stays one, so that progress bars work.

    `prefix` is put before each console line when several ranks are shown, which then have no terminal.
    """
    if os.isatty(1) and not prefix:  # a raw pseudo-terminal with the size of the one on standard output
        source, target = pty.openpty()
        tty.setraw(target)
        with suppress(termios.error, OSError):
            termios.tcsetwinsize(target, termios.tcgetwinsize(1))
    else:
        source, target = os.pipe()
    told, teller = os.pipe()
    copier = os.fork()  # rather than a thread, so that no output is lost when this process is killed or crashes
    if not copier:
        status = 1
        try:
            os.close(target)
            os.close(teller)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)  # it ends with the last writer
            with open(_append(log), "ab", buffering=0) as file:
                _copy(source, told, log, file, prefix.encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(source)
    os.close(told)
    try:
        with _redirected(target):
            yield
    finally:  # signal the end of output and wait: child processes may still hold the output's descriptor
        os.close(teller)
        with suppress(ChildProcessError):
            os.waitpid(copier, 0)


@contextmanager
def alone(descriptor: int) -> Iterator[None]:
    """Keep other ranks from writing to a console: one call of `write` into a pipe is whole only up to 4 kB.

    The lock of the console's file ends with its process. A system that has none goes without.
    """
    held = False
    with suppress(OSError, ValueError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        held = True
    try:
        yield
    finally:
        if held:
            with suppress(OSError):
                fcntl.lockf(descriptor, fcntl.LOCK_UN)


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
    """Redirect descriptors 1 and 2, with line-buffered Python streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, OutputLost):
            if stream is not None:  # None if the console was closed at the start
                stream.flush()
    os.dup2(output, 1)
    os.dup2(error, 2)
    raws = [io.BufferedWriter(_Tolerant(descriptor, "w", closefd=False)) for descriptor in (1, 2)]
    sys.stdout, sys.stderr = [io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True) for raw in raws]


class _Tolerant(io.FileIO):
    """Output descriptor that ignores write errors, such as those of a log on a full disk."""

    def write(self, data: Any) -> int:
        try:
            return os.write(self.fileno(), data)
        except OSError:
            return len(memoryview(data))


def _append(log: Path) -> int:
    """Open a log for appending and return its descriptor; open /dev/null if that fails."""
    try:
        nofollow_folder(log.parent)
        return open_nofollow(log, os.O_APPEND)
    except OSError as error:
        _warn(2, log, error)
        return os.open(os.devnull, os.O_WRONLY)


def _warn(descriptor: int, log: Path, error: OSError) -> None:
    text = f"Warning: {log} cannot be written ({error.strerror}); the run continues without it.\n"
    with suppress(OSError):
        os.write(descriptor, text.encode())


def _copy(source: int, told: int, path: Path, file: BinaryIO, prefix: bytes) -> None:
    """Copy output until its last writer has closed it, or `told` is closed; warn once if the log cannot be written."""
    warned = False

    def log(lines: list[bytes]) -> None:
        nonlocal warned
        try:
            file.write(b"".join(_plain(line) + b"\n" for line in lines))
        except OSError as error:
            if not warned:
                warned = True
                _warn(1, path, error)

    pending = b""
    while source in select.select([source, told], [], [])[0]:
        try:
            data = os.read(source, 1 << 16)
        except OSError:  # the other end of the pseudo-terminal is closed
            data = b""
        if not data:
            break
        lines = (pending + data).split(b"\n")
        pending = lines.pop()
        if len(pending) > 1 << 16:  # a progress bar that overwrites itself: only its last state matters
            pending = pending[max(pending.rfind(b"\r"), 0) :]
        if lines:
            log(lines)
        _show(b"".join(prefix + line + b"\n" for line in lines) if prefix else data)
    if pending:
        log([pending])
        _show(prefix + pending + b"\n" if prefix else b"")


def _show(data: bytes) -> None:
    """Write to the console, ignoring errors: the log continues when the console is closed."""
    with suppress(OSError), alone(1):
        while data:
            data = data[os.write(1, data) :]


def _plain(line: bytes) -> bytes:
    """Return the final state of a line, without escape sequences."""
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])
