"""Processes that tests start are as new interpreters: children of the tests, with their signals, streams and status."""

import os
import signal
import sys
from pathlib import Path

from tests.support import ready

SCRIPT = """
import os, sys, time
print(__name__, sys.argv[1:], os.getcwd(), os.getppid(), os.environ["OF_THE_TEST"], flush=True)
places = [f"/proc/self/fd/{number}" for number in map(int, os.listdir("/proc/self/fd")) if number > 2]
files = {os.path.realpath(place) for place in places if os.path.exists(place)}  # one was of the list itself
print("mine", "torch" in sys.modules, files - {os.devnull}, file=sys.stderr)
if sys.argv[1] == "sleeps":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


def command(folder: Path, argument: str) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    return [sys.executable, str(folder / "script.py"), argument]


def test_streams_status_and_parent(tmp_path: Path) -> None:
    ended = ready.run(command(tmp_path, "3"), cwd=tmp_path, env={**os.environ, "OF_THE_TEST": "yes"})
    assert ended.stdout == f"__main__ ['3'] {tmp_path} {os.getpid()} yes\n"
    assert ended.stderr == "mine True set()\n", "it has imported all, and no open file of the tests"
    assert ended.returncode == 3


def test_a_signal_ends_it(tmp_path: Path) -> None:
    environment = {**os.environ, "OF_THE_TEST": ""}
    for number, error in ((signal.SIGINT, "KeyboardInterrupt\n"), (signal.SIGKILL, "")):
        process = ready.ReadyProcess(command(tmp_path, "sleeps"), env=environment, new_session=True)
        assert process.stdout is not None
        assert process.stdout.readline()
        os.killpg(process.pid, number)
        told = process.communicate(timeout=60)[1]
        assert process.returncode == -number
        assert told.endswith(error)


def test_an_error_is_told_as_by_python(tmp_path: Path) -> None:
    ended = ready.run([sys.executable, "-m", "threefold", "config", "show", "missing.yaml"], cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: Cannot read the config missing.yaml")
    (tmp_path / "script.py").write_text("raise ValueError('wrong')")
    ended = ready.run([sys.executable, tmp_path / "script.py"])
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: wrong\n")
