"""Signals to a process that takes them, one after the other."""

import subprocess
import sys

import pytest

TWICE = """
import os, signal
from threefold.launch.process import StopRequested, StopSignals
with StopSignals():
    try:
        os.kill(os.getpid(), signal.{name})
    except StopRequested as request:
        print(request, flush=True)
os.kill(os.getpid(), signal.{name})
print("ended in order")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_to_a_process_that_ends_already_changes_nothing(name: str) -> None:
    """Such as the second of two that a launcher and a terminal send."""
    ended = subprocess.run([sys.executable, "-c", TWICE.format(name=name)], text=True, capture_output=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{name}\nended in order\n", "")
