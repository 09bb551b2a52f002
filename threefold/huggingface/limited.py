"""Processes that work on content of strangers within limits of time and memory.

In effect, somebody's template or tokenizer is a program: it can run for ever, take all memory, or end the process that
runs it. A `LimitedProcess` has a child run it, which answers one request after another, and another child after a
request that the first did not survive.
"""

import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

from threefold.errors import UserError
from threefold.files import format_bytes

_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from threefold.huggingface.limited import serve; serve(*json.loads(sys.argv[2]))"
)
_ALONE: Final = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""Variables for libraries that would reserve address space for a thread of each core."""
_SLOWEST_START: Final = 120.0
"""Seconds that the start of a child may take, as from a network file system."""
_FRAME: Final = struct.Struct(">Qd")  # before each JSON value: its bytes, and the seconds that answering it may take
_LARGEST: Final = 1 << 30
_NO_MEMORY: Final = "no memory"


@dataclass(frozen=True)
class Limits:
    """Limits of a request to a `LimitedProcess`."""

    seconds: float = 10  # of processor time, which other processes of the machine do not lengthen
    waited: float = 60  # seconds on the clock, for a request that waits instead of computing
    memory: int = 2 << 30  # bytes of address space, on systems that limit it


_USUAL: Final = Limits()


class Refused(Exception):
    """The content fails or exceeds a limit: in its setup, or in a request. The message is a clause."""

    def __init__(self, reason: str, in_setup: bool = False) -> None:
        super().__init__(reason)
        self.in_setup = in_setup


class LimitedProcess:
    """Child process that makes `function(setup)`, which answers requests; all of these are JSON values.

    `function` is written `module:name`; as a start waits for its module, it should import little. The first request
    starts the child, which ends with this object or this process. A fork of this process starts its own.
    """

    def __init__(self, function: str, setup: Any = None, limits: Limits = _USUAL) -> None:
        self._function, self._setup, self.limits = function, setup, limits
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child; a later request starts another one."""
        if self._child is not None:
            self._finish()
            self._child = None

    def ask(self, request: Any, factor: float = 1) -> Any:
        """Return the answer to a request, which may take `factor` times as long as the limits say.

        Raises `Refused` if the child raises it, raises another exception or does not survive, and UserError if no
        process can be started.
        """
        if self._owner != os.getpid():  # a fork, at whose time another thread may have held the lock
            if self._child is not None:
                self._socket.close()
            self._owner, self._lock, self._child = os.getpid(), threading.Lock(), None
        with self._lock:
            try:
                if self._child is not None and self._child.poll() is not None:  # killed since the last request
                    self.close()
                if self._child is None:
                    self._start()
                return self._exchange(request, self.limits.seconds * factor, self.limits.waited * factor)
            except Refused as refused:
                if refused.in_setup:
                    self.close()
                raise
            except BaseException:  # an interrupt leaves an answer that nobody has read
                self.close()
                raise

    def _start(self) -> None:
        package = str(Path(__file__).parents[2])
        paths = [path for path in sys.path if path]  # without the working directory, which may be a stranger's
        paths += [] if package in paths else [package]
        options = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
        given = json.dumps([self._function, self.limits.memory, self._owner])
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, *options, "-c", _START, json.dumps(paths), given],
                    executable=_reachable(),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, **_ALONE},
                    process_group=0,  # Ctrl-C is for this process
                )
        except OSError as error:
            self._socket.close()
            raise UserError(
                f"No process can be started for content that is not trusted ({error.strerror}); raise the limits on "
                "processes and memory (ulimit -u, ulimit -v)."
            ) from None
        self._finish = weakref.finalize(self, _end, self._child, self._socket, self._owner)
        try:
            self._exchange(self._setup, self.limits.seconds, max(self.limits.waited, _SLOWEST_START))
        except Refused as refused:
            raise Refused(str(refused), in_setup=True) from None

    def _exchange(self, request: Any, seconds: float, waited: float) -> Any:
        child = self._child
        assert child is not None
        deadline = time.monotonic() + waited
        try:
            _send(self._socket, request, seconds, deadline)
            answer = _receive(self._socket, deadline)
        except TimeoutError:
            self.close()
            raise Refused(f"it takes more than {waited:,g} seconds") from None
        except (OSError, EOFError):  # the child has ended
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(1.0, deadline - time.monotonic()))
            self.close()
            raise Refused(self._ending(child.returncode, seconds)) from None
        if "refused" not in answer:
            return answer["answer"]
        if answer["refused"] == _NO_MEMORY:
            self.close()  # whose memory may be in pieces
            raise Refused(f"it takes more than {format_bytes(self.limits.memory)} of memory")
        raise Refused(answer["refused"])

    def _ending(self, code: int, seconds: float) -> str:
        """Return the reason for the end of a child, by its exit status."""
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return f"it takes more than {seconds:,g} seconds of processor time"
        if code < 0:
            memory = format_bytes(self.limits.memory)
            return f"the process that tries it ends with {signal.Signals(-code).name}; it may take {memory} of memory"
        return f"the process that tries it cannot run, and ends with exit status {code}"


def _end(child: "subprocess.Popen[bytes]", connection: socket.socket, owner: int) -> None:
    """End a child, if this is the process that started it, and leave no zombie."""
    connection.close()
    if os.getpid() == owner:
        child.kill()
        child.wait()


def _send(connection: socket.socket, value: Any, seconds: float = 0, deadline: float | None = None) -> None:
    # Text may hold half a surrogate pair.
    content = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    _wait_until(connection, deadline)
    connection.sendall(_FRAME.pack(len(content), seconds))
    connection.sendall(content)


def _receive(connection: socket.socket, deadline: float | None = None, timed: bool = False) -> Any:
    """Return the next value; if `timed`, reading and answering it may take only as long as its sender allows."""
    size, seconds = _FRAME.unpack(_read(connection, _FRAME.size, deadline))
    if timed:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
    if size > _LARGEST:
        raise EOFError
    return json.loads(_read(connection, size, deadline).decode("utf-8", "surrogatepass"))


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        _wait_until(connection, deadline)
        if not (count := connection.recv_into(rest)):
            raise EOFError
        rest = rest[count:]
    return content


def _wait_until(connection: socket.socket, deadline: float | None) -> None:
    # After a pause of this process, the answer may have come long since.
    connection.settimeout(None if deadline is None else max(0.01, deadline - time.monotonic()))


def serve(function: str, memory: int, parent: int) -> None:
    """Answer requests that come through standard input, in the child, until its parent has closed it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection = socket.socket(fileno=0)
    module, name = function.split(":")
    make: Callable[[Any], Callable[[Any], Any]] = getattr(import_module(module), name)
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory)):
        with suppress(OSError, ValueError):  # not every system has it, or lets it be set
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    work: Callable[[Any], Any] | None = None
    while True:
        answer: dict[str, Any]
        while not select.select([connection], [], [], 1)[0]:
            if os.getppid() != parent:  # a fork of it may hold the other end open
                os._exit(0)
        try:
            request = _receive(connection, timed=True)
            if work is None:
                work, answer = make(request), {"answer": None}
            else:
                answer = {"answer": work(request)}
            del request
            _send(connection, answer)
        except (EOFError, OSError):
            os._exit(0)
        except MemoryError:
            _send(connection, {"refused": _NO_MEMORY})
        except BaseException as error:  # a panic of a library is no Exception
            _send(connection, {"refused": reason_of(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)


def reason_of(error: BaseException) -> str:
    """Return an error as a clause: its message on one line, or the name of its class."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _reachable() -> str | None:
    """Return a path of this interpreter where its own is in a folder of another user, as after a change of user."""
    try:
        os.stat(sys.executable)
    except PermissionError:
        return "/proc/self/exe"
    except OSError:
        pass
    return None
