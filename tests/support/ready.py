"""Python processes that have already imported what a run needs: forks of a server instead of new interpreters.

Importing torch and the rest takes most of the time of a small `threefold train`. These tests check what happens
afterwards: the signals that a process gets, its output, its exit status. The process is a fork of one that has imported
everything, and a child of the test process like any other: `subprocess` waits for it and reads its output.

For commands `[sys.executable, "-m", module, ...]` and `[sys.executable, script, ...]`. If the start of an interpreter
or what modules read on import matters (settings of a library, other packages), use `subprocess`.
"""

import atexit
import ctypes
import faulthandler
import functools
import gc
import io
import logging
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from threefold.launch.process import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
_LARGEST = 1 << 17  # bytes of a request


class _Request(NamedTuple):
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    new_session: bool


class ReadyProcess(subprocess.Popen[str]):
    """Counterpart of `subprocess.Popen` for a few of its options."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
        new_session: bool = False,
    ) -> None:
        self._request = _Request([*map(str, arguments)], str(cwd or Path.cwd()), dict(env), new_session)
        pipe = subprocess.PIPE
        super().__init__(self._request.arguments, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def _execute_child(self, *given: Any) -> None:  # `subprocess` calls it to start a process
        ends = given[10:16]  # pipes of standard input, output and error: read end and write end of each
        self.pid = fork_server().fork(self._request, (ends[0], ends[3], ends[5]))
        self._child_created = True
        self._close_pipe_fds(*ends)


def run(arguments: Sequence[str | Path], *, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run` with captured text."""
    with ReadyProcess(arguments, **options) as process:
        try:
            output, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


@functools.cache
def fork_server() -> "ForkServer":
    """Return this process's server; call it first before torch operations, after which the process cannot be forked."""
    return ForkServer()


class ForkServer:
    """Fork of this process that forks the others."""

    def __init__(self) -> None:
        self._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if not os.fork():
            try:
                die_with_parent(parent)
                self._connection.close()
                _serve(there)
            finally:
                os._exit(1)
        there.close()

    def fork(self, request: _Request, streams: Sequence[int]) -> int:
        """Start a process with these standard streams and return its id."""
        # A fork of the server forks it and ends; the orphan becomes a child of this process (a subreaper).
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._connection, [pickle.dumps(request)], streams)
            return int(self._connection.recv(_LARGEST))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)


def _serve(connection: socket.socket) -> None:
    gc.freeze()
    while True:
        data, streams, _, _ = socket.recv_fds(connection, _LARGEST, 3)
        if not data:
            os._exit(0)
        here, there = socket.socketpair()
        between = os.fork()
        if not between:
            if not os.fork():
                _become(pickle.loads(data), streams, there)
            os._exit(0)
        os.waitpid(between, 0)
        pid = here.recv(20)
        here.send(b"go")
        connection.send(pid)
        for end in (here, there):
            end.close()
        for stream in streams:
            os.close(stream)


def _become(request: _Request, streams: Sequence[int], server: socket.socket) -> NoReturn:
    """Run a command as a new interpreter would, and end."""
    status = 1
    try:
        if request.new_session:
            os.setsid()
        server.send(str(os.getpid()).encode())
        server.recv(2)  # when it has its parent
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        # Not closed: test objects that still hold a descriptor's number would use whatever is opened next.
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                os.dup2(nothing, int(name))
        _forget_the_tests()
        status = _status_of(request.arguments[1:])
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def _forget_the_tests() -> None:
    """Reset streams, signals, hooks and warnings as in a new interpreter."""
    multiprocessing.util._finalizer_registry.clear()
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    given, output, error = (io.FileIO(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(given), "utf-8")
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(output), "utf-8")
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(io.BufferedWriter(error), "utf-8", "backslashreplace", None, True)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr
        if isinstance(logger, logging.Logger):
            logger.handlers[:] = [each for each in logger.handlers if not type(each).__module__.startswith("_pytest")]


def _status_of(arguments: list[str]) -> int:
    """Run a module or a script; return the exit status of the interpreter."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    first = os.getcwd() if is_module else str(Path(arguments[0]).resolve().parent)
    sys.path[:] = filter(None, [first, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
