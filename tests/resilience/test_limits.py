"""Limits of a process: refusals before a rank starts, and errors that name them."""

import multiprocessing
import multiprocessing.popen_fork  # another user may be unable to read it later
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from threefold.errors import UserError
from threefold.launch.failure import from_exception, from_exit_code
from threefold.resilience import limits
from threefold.resilience.limits import explain_limit, require_room


def test_too_few_open_files_are_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 24 of them two ranks waited for minutes; with 54 four ranks trained."""
    with monkeypatch.context() as patched:
        patched.setattr(resource, "getrlimit", lambda kind: (20, 20))
        with pytest.raises(UserError) as raised:
            require_room(2)
        patched.setattr(resource, "getrlimit", lambda kind: (54, 54))
        require_room(4)
        with pytest.raises(UserError, match=r"too few for 5 ranks that are connected to each other; set it to 122 or"):
            require_room(5)
        patched.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
        require_room(64)
    assert str(raised.value) == (
        "A process may have 20 files open here (ulimit -n), too few for 2 ranks that are connected to each other; set "
        "it to 80 or more with `ulimit -n 80`."
    )


def test_too_few_processes_are_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 of them one of two ranks could not start its threads."""
    monkeypatch.setattr(limits, "_tasks_of_user", lambda: 11)
    monkeypatch.setattr(limits, "_task_limits", lambda: {"RLIMIT_NPROC (ulimit -u)": 32, "pids.max": 4000})
    with pytest.raises(UserError) as raised:
        require_room(2)
    assert str(raised.value) == (
        "No more processes or threads can be started here (RLIMIT_NPROC (ulimit -u) allows 32 and pids.max allows "
        "4,000), and 2 ranks of a run need about 32 besides the 11 that this user has; raise the limit, as with "
        "`ulimit -u 4096`, or use fewer ranks."
    )
    monkeypatch.setattr(limits, "_task_limits", lambda: {"RLIMIT_NPROC (ulimit -u)": 33})
    require_room(2)
    monkeypatch.setattr(limits, "_task_limits", lambda: {"RLIMIT_NPROC (ulimit -u)": 19})
    require_room(1)
    monkeypatch.setattr(limits, "_task_limits", dict)
    require_room(2)


def test_the_processes_of_this_user_are_counted() -> None:
    assert limits._tasks_of_user() >= threading.active_count()


def fork() -> None:
    if not os.fork():
        os._exit(0)


def start_thread() -> None:
    threading.Thread(target=int).start()


def start_process() -> None:
    multiprocessing.get_context("fork").Process(target=int).start()


def start_program() -> None:
    subprocess.run(["true"], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count otherwise")
@pytest.mark.parametrize("start", [fork, start_thread, start_process, start_program])
def test_a_process_or_thread_too_many_names_the_limit(start: Callable[[], None]) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if not os.getuid():  # the kernel exempts root
                os.setresuid(77_771, 77_771, 77_771)
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            start()
        except BaseException as error:
            os.write(write, from_exception(3, error).error.encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as told:
        text = told.read()
    os.waitpid(pid, 0)
    assert text.startswith("no more processes or threads can be started here (RLIMIT_NPROC (ulimit -u) allows 1")
    assert "and 1 rank of a run needs about 16; raise the limit" in text


def test_other_errors_are_of_no_limit() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError) as raised:
        os.read(read, 1)
    for descriptor in (read, write):
        os.close(descriptor)
    for error in (
        raised.value,
        RuntimeError("shapes"),
        SystemError("x"),
        ValueError("Resource temporarily unavailable"),
    ):
        assert explain_limit(error) == ""


def test_a_limited_address_space_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CPython and the loader say when there is no room for torch."""
    errors = (MemoryError(), SystemError("error return without exception set"))
    errors += (ImportError("libtorch_cpu.so: failed to map segment from shared object"),)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (500_000_000, 500_000_000))
    for error in errors:
        assert explain_limit(error) == (
            "the address space of a process, which RLIMIT_AS (ulimit -v) limits to 0.50 GB here, is not enough: none "
            "is left; a rank of a small model takes 1.3 to 2 GB, so raise the limit, as with `ulimit -v unlimited`"
        )


def test_an_abort_under_a_limit_on_the_address_space_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code aborts where it cannot allocate memory for a thread; without a limit, nothing is guessed."""
    assert "RLIMIT_AS" not in from_exit_code(1, -signal.SIGABRT).error
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (1_500_000_000, -1))
    monkeypatch.setattr(limits, "_task_limits", dict)
    told = "which RLIMIT_AS (ulimit -v) limits to 1.50 GB here, is not enough"
    assert told in from_exit_code(1, -signal.SIGABRT).error
    assert told in explain_limit(RuntimeError("can't start new thread"))
    assert told not in from_exit_code(1, -signal.SIGKILL).error


def test_a_failure_at_the_limit_of_open_files_is_told() -> None:
    """No module can be imported then, such as one that explains the failure."""
    script = """
import resource
from threefold.launch.failure import from_exception
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError as error:
    print(from_exception(0, error).error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("OSError: [Errno 24] Too many open files: '/dev/null'\n", "")
