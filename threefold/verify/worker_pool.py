"""Persistent local worker processes that run functions as the ranks of a new process group.

For many short distributed calls from one process: the test suite and `threefold verify`. A fork server forks the
workers. It is itself forked when the pool is made and runs no torch operation: a process that has threads of OpenMP
cannot be forked safely, and replacement workers must start like the first ones.
"""

import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Final, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist

from threefold.comm.axis import dumps
from threefold.cpu.scratch import scratch_folder
from threefold.launch.failure import pickled
from threefold.launch.process import die_with_parent, signal_name
from threefold.launch.worker import stay_on_loopback, wait_for_all
from threefold.report.whole_lines import whole_lines
from threefold.torch_private.runtime import end_openmp_threads

GRACE = 0.3
"""Seconds to wait after the first failure for the reports of other ranks."""
_LONGEST_CALL: Final = 12  # timeouts that a call may take until its first rank answers; the other ranks have one more


class WorkerError(RuntimeError):
    """A rank raised (`error`, unless it cannot be pickled), or its process ended."""

    def __init__(self, rank: int, what: str, error: BaseException | None = None) -> None:
        super().__init__(f"rank {rank} failed: {what}")
        self.rank, self.error = rank, error


class _Failure(NamedTuple):
    traceback: str
    error: BaseException | None


class _Worker(NamedTuple):
    pid: int
    connection: Connection


class WorkerPool:
    """Pool of `size` local CPU workers with one thread each.

    Its workers may compute with several threads, whatever the process has computed before. Use it as a context manager,
    or call `close`.

    Args:
        size: largest world size.
        timeout: time limit of a collective, in every process group of a mesh; a rank that waits longer raises. A rank
            must also answer within this time after the first one, which may take `_LONGEST_CALL` times as long.
    """

    def __init__(self, size: int, timeout: timedelta = timedelta(minutes=5)) -> None:
        self.size, self._timeout = size, timeout
        self._workers: list[_Worker] = []
        here, there = Pipe()
        end_openmp_threads()
        parent, pid = os.getpid(), os.fork()
        if not pid:
            _in_child(parent, lambda: _fork_server(there), here)
        there.close()
        self._fork_server = _Worker(pid, here)

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(*args)` on `world_size` ranks of a new gloo process group and return their results by rank.

        `fn` is a function of an importable module. Arguments and results are pickled; tensors by value.

        Raises:
            WorkerError: a rank raised, its process ended, or it does not answer. The workers of this call are replaced.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size is {world_size} but the pool has 1 to {self.size} workers")
        while len(self._workers) < world_size:
            here, there = Pipe()
            self._fork_server.connection.send("fork")
            send_handle(self._fork_server.connection, there.fileno(), self._fork_server.pid)
            there.close()
            self._workers.append(_Worker(self._fork_server.connection.recv(), here))
        workers = self._workers[:world_size]
        with scratch_folder(tempfile.gettempdir()) as folder:
            store = os.path.join(folder, "store")
            call = dumps((fn, args))
            for rank, worker in enumerate(workers):
                job = pickle.dumps((sys.path, call, rank, world_size, store, self._timeout))
                with suppress(BrokenPipeError):  # a worker ended since the last call; `_collect` reports it
                    worker.connection.send_bytes(job)
            try:
                return _collect(workers, self._how_it_ended, self._timeout.total_seconds())
            except BaseException:
                self._discard(workers)
                raise

    def close(self) -> None:
        self._discard(list(self._workers))
        # A process that the caller has forked may hold the pipe too, so that closing it alone does not end the server.
        with suppress(BrokenPipeError):
            self._fork_server.connection.send("end")
        self._fork_server.connection.close()
        os.waitpid(self._fork_server.pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _how_it_ended(self, worker: _Worker) -> str:
        self._fork_server.connection.send(worker.pid)
        return str(self._fork_server.connection.recv())

    def _discard(self, workers: Sequence[_Worker]) -> None:
        self._workers = [worker for worker in self._workers if worker not in workers]
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            self._how_it_ended(worker)
            worker.connection.close()


def _collect(workers: Sequence[_Worker], how_it_ended: Callable[[_Worker], str], timeout: float) -> list[Any]:
    """Return the results by rank.

    Waits `GRACE` seconds after a failure: a killed rank is the cause even if another rank's error about the lost
    connection arrives first. Waits `timeout` seconds after the first answer for a rank that never answers, as in an
    endless loop.
    """
    waiting: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
    results: dict[int, Any] = {}
    failures: list[WorkerError] = []
    deadline = time.monotonic() + _LONGEST_CALL * timeout
    while waiting:
        ready = wait(list(waiting), GRACE if failures else max(0.0, deadline - time.monotonic()))
        if not ready:
            if not failures:
                late = sorted(waiting.values())
                if not results:
                    raise WorkerError(late[0], f"no rank of this call has answered for {_LONGEST_CALL * timeout:g} s")
                more = f", nor have {len(late) - 1} more" if len(late) > 1 else ""
                raise WorkerError(late[0], f"it has not answered for {timeout:g} s after rank {min(results)} did{more}")
            break
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                answer = pickle.loads(workers[rank].connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                raise WorkerError(rank, f"its process ended, {how_it_ended(workers[rank])}") from None
            if isinstance(answer, _Failure):
                failures.append(WorkerError(rank, answer.traceback, answer.error))
            if not results:
                deadline = min(deadline, time.monotonic() + timeout)
            results[rank] = answer
    if failures:
        raise failures[0] from failures[0].error
    return [results[rank] for rank in range(len(workers))]


def _in_child(parent: int, body: Callable[[], None], *foreign: Connection) -> NoReturn:
    """Run `body` in a forked child, which always ends here."""
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for connection in foreign:
            connection.close()
        body()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _fork_server(connection: Connection) -> None:
    """Serve requests until the pool is closed: fork a worker on "fork", report how a worker ended on its pid."""
    gc.freeze()  # like `shared_objects`, for as long as this process lives
    endings: dict[int, str] = {}
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request == "end":
            return
        if request != "fork":
            if request not in endings:
                code = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
                endings[request] = f"exit status {code}" if code >= 0 else f"killed by {signal_name(-code)}"
            connection.send(endings[request])
            continue
        pipe = Connection(recv_handle(connection))
        parent, pid = os.getpid(), os.fork()
        if not pid:
            _in_child(parent, lambda pipe=pipe: _serve(pipe), connection)  # type: ignore[misc]
        pipe.close()
        endings.pop(pid, None)
        connection.send(pid)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    stay_on_loopback()
    while True:
        try:
            raw = connection.recv_bytes()
        except EOFError:
            return
        try:
            data = dumps(_answer(raw))
        except Exception as error:
            data = pickle.dumps(_Failure(f"its result cannot be pickled: {error}", None))
        connection.send_bytes(data)


def _answer(raw: bytes) -> Any:
    """Return the result of a job or its failure; a worker that failed is not used again."""
    try:
        path, call, rank, world_size, file, timeout = pickle.loads(raw)
        sys.path[:] = path  # to import the function as the pool's process does
        fn, args = pickle.loads(call)
        store = dist.FileStore(file, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        wait_for_all()
        with whole_lines():  # a model of the user may print
            result = fn(*args)
        dist.destroy_process_group()
        # Groups of a mesh are in cycles with it, and each has a gloo thread that wakes every 10 ms.
        gc.collect()
        return result
    except BaseException as error:
        text = traceback.format_exc()
        return _Failure(text, None if pickled(error) is None else error)
