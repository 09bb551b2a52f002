"""A child process within limits: what it refuses, how it ends, and that nothing is left of it."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from threefold.errors import UserError
from threefold.huggingface.limited import LimitedProcess, Limits, Refused

HERE = "tests.huggingface.test_limited"
TIGHT = Limits(seconds=0.2, waited=20, memory=100_000_000)


def spin(_: Any) -> None:
    while True:
        pass


def work(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def power(_: Any) -> int:
    """One operation, in which no signal handler of Python would run."""
    return len(range(10 ** (10**9) % 7))


def wait(_: Any) -> None:
    threading.Event().wait()


def grow(_: Any) -> None:
    held = ["a"]
    while True:
        held = held + held


def recurse(value: Any) -> Any:
    return recurse([value])


def abort(_: Any) -> None:
    os.abort()


def leave(_: Any) -> None:
    os._exit(3)


class Panic(BaseException):
    """As a library in Rust raises it."""


def panic(_: Any) -> None:
    raise Panic("index out of\nbounds")


WORK: dict[str, Callable[[Any], Any]] = {
    **{each.__name__: each for each in (spin, work, power, wait, grow, recurse, abort, leave, panic)},
    "pid": lambda _: os.getpid(),
    "echo": lambda value: value,
    "modules": lambda _: sorted(sys.modules),
}


def make(setup: Any) -> Callable[[Any], Any]:
    if setup is not None:
        WORK[setup](None)
    return lambda request: WORK[request[0]](request[1] if len(request) > 1 else None)


REASONS = {
    "spin": "it takes more than 0.2 seconds of processor time",
    "power": "it takes more than 0.2 seconds of processor time",
    "grow": "it takes more than 100.0 MB of memory",
    "recurse": "maximum recursion depth exceeded",
    "abort": "the process that tries it ends with SIGABRT; it may take 100.0 MB of memory",
    "leave": "the process that tries it cannot run, and ends with exit status 3",
    "panic": "index out of bounds",
}


def test_what_exceeds_a_limit_or_fails_is_refused_and_the_next_request_is_answered() -> None:
    with LimitedProcess(f"{HERE}:make", None, TIGHT) as child:
        for name, reason in REASONS.items():
            with pytest.raises(Refused) as refused:
                child.ask([name])
            assert str(refused.value) == reason
            assert not refused.value.in_setup
            assert child.ask(["echo", [name, None, 1.5, {"é": "\ud800\0🌈"}]]) == [name, None, 1.5, {"é": "\ud800\0🌈"}]


def test_one_that_waits_is_refused_by_the_clock() -> None:
    with LimitedProcess(f"{HERE}:make", None, Limits(waited=0.1)) as child:
        with pytest.raises(Refused, match=r"^it takes more than 0\.1 seconds$"):
            child.ask(["wait"])
        with pytest.raises(Refused, match=r"^it takes more than 0\.3 seconds$"):
            child.ask(["wait"], factor=3)


@pytest.mark.parametrize("name", ["spin", "grow", "recurse", "abort"])
def test_a_setup_is_limited_too(name: str) -> None:
    with LimitedProcess(f"{HERE}:make", name, TIGHT) as child:
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                child.ask(["echo", 1])
            assert str(refused.value) == REASONS[name]
            assert refused.value.in_setup


def test_each_request_has_the_whole_time() -> None:
    """However much time the child has taken before."""
    with LimitedProcess(f"{HERE}:make", None, Limits(seconds=0.2)) as child:
        first = child.ask(["pid"])
        for _ in range(3):
            child.ask(["work", 0.12])
        assert child.ask(["pid"]) == first


def test_a_child_that_is_killed_between_requests_is_replaced() -> None:
    with LimitedProcess(f"{HERE}:make") as child:
        first = child.ask(["pid"])
        os.kill(first, signal.SIGKILL)
        _await_end(first)
        second = child.ask(["pid"])
        assert second != first
        assert not os.path.exists(f"/proc/{first}")  # not even as a zombie
    assert not os.path.exists(f"/proc/{second}")


def test_an_interrupt_leaves_no_answer_for_the_next_request() -> None:
    with LimitedProcess(f"{HERE}:make") as child:
        child.ask(["echo", 1])
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            child.ask(["wait"])
        assert child.ask(["echo", 2]) == 2


def test_the_child_of_a_renderer_imports_little() -> None:
    """No torch, no numpy and none of the configs, so that it starts in a tenth of a second."""
    for module in ("threefold.huggingface.template_sandbox", "threefold.huggingface.tokenizer_trial"):
        code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
        loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        assert not {"torch", "numpy", "pydantic", "yaml", "matplotlib", "rich", "multiprocessing"} & {*loaded}


def test_where_no_process_can_be_started_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"^No process can be started for content that is not trusted \(No such file"):
        LimitedProcess(f"{HERE}:make").ask(["echo", 1])


ENDINGS = {
    "the end of its script": "",
    "sys.exit": "sys.exit(3)",
    "os._exit": "os._exit(0)",
    "SIGKILL": "os.kill(os.getpid(), 9)",
    "SIGKILL, while a fork of it goes on": "os.fork() and os.kill(os.getpid(), 9); sys.stdin.read()",
}
OWNER = f"""
import os, sys
from threefold.huggingface.limited import LimitedProcess
child = LimitedProcess("{HERE}:make")
print(child.ask(["pid"]), flush=True)
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_child_ends_with_its_parent(ending: str) -> None:
    command = [sys.executable, "-c", OWNER + ENDINGS[ending]]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    with owner:
        _await_end(pid)


FORKED = """
import threading
import time
held = threading.Event()
def hold():
    with child._lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
number = os.fork()
if not number:
    print(child.ask(["pid"]), child.ask(["echo", "of the fork"]), flush=True)
    sys.exit(0)
os.waitpid(number, 0)
print(child._child.poll(), flush=True)
"""


def test_a_fork_has_its_own_child_and_leaves_that_of_its_parent() -> None:
    """Even if another thread was asking at the time of the fork."""
    done = subprocess.run([sys.executable, "-c", OWNER + FORKED], capture_output=True, text=True, check=True)
    first, forked, poll = done.stdout.splitlines()
    pid, _, told = forked.partition(" ")
    assert (told, poll) == ("of the fork", "None")
    assert pid != first
    for each in (first, pid):
        _await_end(int(each))


def _await_end(pid: int) -> None:
    """Wait until a process has ended, at most 20 seconds."""
    with suppress(ProcessLookupError):  # it has
        descriptor = os.pidfd_open(pid)
        try:
            assert select.select([descriptor], [], [], 20)[0]
        finally:
            os.close(descriptor)
