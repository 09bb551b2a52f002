"""Signals to a process that takes them, one after the other."""

import os
import signal
import subprocess
import sys

import pytest

from threefold.launch import process
from threefold.launch.process import StopSignals

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


@pytest.mark.parametrize(("apart", "taken"), [(60.0, [False]), (0.0, [False, True])])
def test_signals_of_one_press_are_one(monkeypatch: pytest.MonkeyPatch, apart: float, taken: list[bool]) -> None:
    """Ctrl-C reaches a rank from the terminal and from its launcher; a second press is another signal."""
    monkeypatch.setattr(process, "ONE_PRESS", apart)
    found: list[bool] = []
    with StopSignals(process_ends=False) as signals, signals.passed_to(lambda number, again: found.append(again)):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert found == taken
    assert signals.received == signal.SIGUSR1
