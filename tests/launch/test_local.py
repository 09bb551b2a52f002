"""Runs on local processes, with real kills."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import ready
from tests.support.processes import CpuWaits, assert_gone, pids_of
from tests.support.sweep import sweep
from threefold.errors import UserError
from threefold.launch.failure import RankFailed, cause, from_exception, from_exit_code, of_lost_peer
from threefold.launch.output import log_file

HERE = Path(__file__).parent
LONGEST = 300.0
"""Seconds after which a run that ought to have ended is taken for one that hangs."""
SPAWN = """
import sys
from pathlib import Path
import workers
from threefold.errors import UserError
from threefold.launch import RankFailed, spawn
if __name__ == "__main__":
    folder = Path({folder!r})
    try:
        spawn(workers.{worker}, {args}, {ranks}, run_dir=folder / "run", {options})
    except (RankFailed, UserError) as error:
        sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


def start(
    folder: Path, worker: str, args: str, ranks: int, options: str = "", new_session: bool = False, begin: str = ""
) -> subprocess.Popen[str]:
    """A process of its own, which has run nothing parallel, that spawns ranks."""
    script = folder / "spawning.py"
    script.write_text(begin + SPAWN.format(folder=str(folder), worker=worker, args=args, ranks=ranks, options=options))
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return ready.ReadyProcess([sys.executable, script], env=environment, new_session=new_session)


def spawned(folder: Path, worker: str, args: str, ranks: int, options: str = "") -> tuple[int, str, str]:
    process = start(folder, worker, args, ranks, options)
    output, error = process.communicate(timeout=LONGEST)
    return process.returncode, output, error


def log_of(folder: Path, rank: int) -> str:
    return log_file(folder / "run", rank).read_text()


@sweep(("ranks", "options"), [(1, ""), (4, ""), (2, "start_method='spawn'")], quick=(1,))
def test_all_ranks_meet_and_log(tmp_path: Path, ranks: int, options: str) -> None:
    code, output, error = spawned(tmp_path, "report_sum", "(folder,)", ranks, options)
    assert (code, error) == (0, "")
    total = str(sum(range(ranks)))
    assert [(tmp_path / f"sum_{rank}").read_text() for rank in range(ranks)] == [total] * ranks
    assert output == "hello from 0\nnative words of 0\n"
    for rank in range(ranks):
        assert log_of(tmp_path, rank) == f"hello from {rank}\nnative words of {rank}\n"


@pytest.mark.slow
def test_restart_appends_to_the_logs(tmp_path: Path) -> None:
    for _ in range(2):
        spawned(tmp_path, "report_sum", "(folder,)", 2)
    assert log_of(tmp_path, 1) == "hello from 1\nnative words of 1\n" * 2


@pytest.mark.slow
def test_chosen_ranks_on_the_console(tmp_path: Path) -> None:
    _, output, _ = spawned(tmp_path, "report_sum", "(folder,)", 3, "console_ranks=(0, 2)")
    expected = [f"[rank {rank}] {words} {rank}" for rank in (0, 2) for words in ("hello from", "native words of")]
    assert sorted(output.splitlines()) == sorted(expected)


@sweep(
    ("rank", "how", "error"),
    [
        (0, "raise", "ValueError: the cat sat on the keyboard"),
        (2, "raise", "ValueError: the cat sat on the keyboard"),
        (2, "kill", "its process was killed by SIGKILL, as when memory runs out"),
        (0, "exit", "its process ended with exit status 7"),
    ],
    quick=(0,),
)
def test_one_message_names_the_rank_that_failed(tmp_path: Path, rank: int, how: str, error: str) -> None:
    process = start(tmp_path, "fail", f"(folder, {rank}, {how!r})", 4)
    with CpuWaits(process.pid) as waits:
        output, message = process.communicate(timeout=LONGEST)
        assert waits.seconds_since(float((tmp_path / "failed_at").read_text())) <= 10
    log = log_file(tmp_path / "run", rank)
    assert message == f"RankFailed: rank {rank} failed: {error} (log: {log})\n"
    assert process.returncode == 1
    assert output == ("last words of 0\n" if rank == 0 else "")
    assert log.read_text().startswith(f"last words of {rank}\n")
    assert ("Traceback" in log.read_text()) == (how == "raise")
    assert len(pids_of(tmp_path)) == 4
    assert_gone(pids_of(tmp_path))


@pytest.mark.parametrize("rooms", ["()", "('resilience',)"])
def test_a_killed_rank_is_named_with_and_without_the_watch(tmp_path: Path, rooms: str) -> None:
    begin = f"from threefold import doors\ndoors.ROOMS = {rooms}\n"
    process = start(tmp_path, "fail", "(folder, 1, 'kill')", 2, "timeout=600.0", begin=begin)
    _, message = process.communicate(timeout=LONGEST)
    log = log_file(tmp_path / "run", 1)
    error = "its process was killed by SIGKILL, as when memory runs out"
    assert message == f"RankFailed: rank 1 failed: {error} (log: {log})\n"
    assert_gone(pids_of(tmp_path))


@pytest.mark.slow
def test_user_error_is_told_once(tmp_path: Path) -> None:
    code, output, error = spawned(tmp_path, "user_error_everywhere", "()", 3)
    assert (code, output, error) == (1, "", "UserError: data.path is nowhere.\n")
    assert log_of(tmp_path, 1) == ""


def wait_until_up(process: subprocess.Popen[str], ranks: int) -> None:
    assert process.stdout is not None
    lines = {process.stdout.readline() for _ in range(ranks + 1)}
    assert any("all up" in line for line in lines)


def test_interrupt_ends_all(tmp_path: Path) -> None:
    process = start(tmp_path, "wait_forever", "(folder,)", 3, "console_ranks=(0, 1, 2)", new_session=True)
    wait_until_up(process, 3)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=LONGEST)
    assert error.splitlines()[-1] == "KeyboardInterrupt"
    assert len(pids_of(tmp_path)) == 3
    assert_gone(pids_of(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_ranks_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "wait_forever", "(folder,)", 3, "console_ranks=(0, 1, 2)")
    wait_until_up(process, 3)
    process.kill()
    process.communicate(timeout=LONGEST)  # returns when no rank and no copier holds the pipe any more
    assert len(pids_of(tmp_path)) == 3
    assert_gone(pids_of(tmp_path))


@pytest.mark.slow
def test_terminal_stays_one_and_the_log_stays_text(tmp_path: Path) -> None:
    master, slave = os.openpty()
    script = tmp_path / "spawning.py"
    script.write_text(SPAWN.format(folder=str(tmp_path), worker="draw", args="()", ranks=2, options=""))
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=slave, stderr=slave)
    assert process.wait(timeout=300) == 0
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert shown.startswith("terminal\r\n")
    assert "\x1b[32m50 %\x1b[0m" in shown
    assert log_of(tmp_path, 0) == "terminal\n100 %\n"


def test_exceptions_are_what_the_console_says() -> None:
    lost = from_exception(0, RuntimeError("Connection closed by peer"))
    aborted = from_exit_code(1, -signal.SIGABRT)
    killed = from_exit_code(2, -signal.SIGKILL)
    assert cause([lost, aborted, killed]) is killed
    assert cause([aborted, lost]) is lost
    assert isinstance(killed.exception(None), RankFailed)
    assert isinstance(from_exception(0, UserError("x")).exception(None), UserError)


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 58), lambda: np.empty(1 << 60, np.uint8)])
def test_an_allocation_that_fails_is_a_sentence(allocate: object) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()  # type: ignore[operator]
    assert re.fullmatch(
        r"the memory of this machine, [0-9.,]+ GB for all its processes, is not enough: 1,152,921,504\.6 GB could not "
        r"be allocated; use a smaller train\.micro_batch_size, train\.recompute, parallel\.zero, or more ranks of tp "
        r"or pp on more machines",
        from_exception(0, caught.value).error,
    )
    assert from_exception(0, RuntimeError("shapes do not match")).error == "RuntimeError: shapes do not match"


def test_a_rank_that_lost_another_does_not_blame_itself() -> None:
    """Nor does it show a user the path of a class of torch."""
    from threefold.errors import PeerLostError

    def told(error: Exception) -> str:
        return of_lost_peer(from_exception(2, error), error).message(None)

    gone = "failed: its process ended without a report, or its host is out of reach of rank 2"
    assert told(PeerLostError("rank 1 ended while rank 2 was in all_reduce_")) == f"rank 1 {gone}"
    lost = dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")
    assert told(lost) == f"a rank {gone}"
    assert told(RuntimeError("Connection closed by peer [127.0.0.1]:4711")) == f"a rank {gone}"
    assert told(ValueError("a connection of mine")) == "rank 2 failed: ValueError: a connection of mine"
    assert told(UserError("no peer")) == "no peer"


SIGNALLED = """
import multiprocessing, os, signal, sys
sys.path.insert(0, {here!r})
import workers
from threefold.launch import spawn
from threefold.launch.process import StopRequested, StopSignals
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
with StopSignals() as signals:
    try:
        spawn(workers.wait_forever, ({folder!r},), 2, signals=signals)
    except StopRequested as request:
        print(request, len(multiprocessing.active_children()))
sys.stdout.flush()
os._exit(0)  # not after waiting for a rank that was forgotten
"""


def test_a_signal_while_a_rank_is_started_leaves_none(tmp_path: Path) -> None:
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED.format(here=str(HERE), folder=str(tmp_path)))
    ended = ready.run([sys.executable, script])
    assert (ended.stdout, ended.stderr) == ("SIGTERM 0\n", "")
