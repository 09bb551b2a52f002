"""One run at a time in one folder, with real processes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.errors import UserError
from threefold.launch.run_folder import LOCK_FILE, Holder, require_folder, run_lock

HOLD = """
import sys
from pathlib import Path
from threefold.errors import UserError
from threefold.launch.run_folder import run_lock
print("ready", flush=True)
sys.stdin.readline()
try:
    with run_lock(Path({run!r})):
        print("held", flush=True)
        sys.stdin.readline()
except UserError as error:
    print(error, flush=True)
"""


def holder_of(run: Path) -> subprocess.Popen[str]:
    """A process that takes the lock at its first line of input and releases it at its second."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(run=str(run))], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_held_lock_is_refused_by_the_name_of_its_holder(tmp_path: Path) -> None:
    process = holder_of(tmp_path / "run")
    tell(process)
    assert answer(process) == "held"
    with pytest.raises(UserError) as refused, run_lock(tmp_path / "run"):
        pass
    assert f"process {process.pid} on host {socket.gethostname()}, since 20" in str(refused.value)
    tell(process)
    assert process.wait(timeout=300) == 0
    with run_lock(tmp_path / "run"):
        holder = Holder.read(tmp_path / "run" / LOCK_FILE)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert Holder.read(tmp_path / "run" / LOCK_FILE) is None


def test_a_name_that_no_log_can_hold_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="whose bytes are not UTF-8, in which the run's log names its folder; choose"):
        require_folder(tmp_path / os.fsdecode(b"x\xff"))


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    process = holder_of(tmp_path / "run")
    tell(process)
    assert answer(process) == "held"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=300)
    with run_lock(tmp_path / "run"):
        pass


def test_a_holder_lives_here_if_its_process_is_of_this_host() -> None:
    here = socket.gethostname()
    assert Holder(here, os.getpid(), "now").is_alive_here()
    assert not Holder(f"not-{here}", os.getpid(), "now").is_alive_here()
    assert not Holder(here, 1 << 30, "now").is_alive_here()


def test_lock_is_waited_for_while_its_holder_is_not_seen_to_live(tmp_path: Path) -> None:
    """A child that outlives the holder for a moment, with the lock in its hands."""
    run = tmp_path / "run"
    process = holder_of(run)
    tell(process)
    assert answer(process) == "held"
    (run / LOCK_FILE).write_text('{"host": "another host", "pid": 1, "since": "yesterday"}')
    second = holder_of(run)
    tell(second)
    tell(process)
    assert process.wait(timeout=300) == 0
    assert answer(second) == "held"
    tell(second)
    assert second.wait(timeout=300) == 0


def race(run: Path, starters: int) -> list[str]:
    """What processes say that take the lock at the same instant."""
    processes = [holder_of(run) for _ in range(starters)]
    for process in processes:
        tell(process)
    answers = [answer(process) for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=300)
    return answers


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(5, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.sweep)]
)
def test_exactly_one_of_several_wins(tmp_path: Path, rounds: int) -> None:
    for number in range(rounds):
        answers = race(tmp_path / f"run{number}", 4)
        assert answers.count("held") == 1
        assert sum("is in use by another run (process " in each for each in answers) == 3


@pytest.mark.skipif(subprocess.run(["which", "strace"], capture_output=True).returncode != 0, reason="needs strace")
def test_file_system_without_locks_is_warned_of(tmp_path: Path) -> None:
    """`flock` answers as it does on a Lustre that is mounted without it."""
    traced = ["strace", "-f", "-o", os.devnull, "-e", "inject=flock:error=ENOSYS"]
    process = subprocess.run(
        [*traced, sys.executable, "-c", HOLD.format(run=str(tmp_path / "run"))],
        text=True,
        input="\n\n",
        capture_output=True,
        timeout=300,
    )
    if "Operation not permitted" in process.stderr:
        pytest.skip("strace may not trace here")
    assert process.stdout.split() == ["ready", "held"]
    assert "has no locks, so nothing keeps a second run out of it" in process.stderr
    assert process.stderr.count("\n") == 1
