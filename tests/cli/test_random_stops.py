"""SIGTERM at random moments of a compiled run, in each of its phases: what was made is saved, and the run continues."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.kills import Moment, beacon, moments, pause, ticks
from tests.cli.runs import (
    LONGEST,
    check_checkpoints,
    children,
    command,
    end_of,
    losses,
    record,
    settings,
    start,
    undisturbed,
)
from threefold.checkpoint.folder import newest, path_of

PHASES = ("start-up", "compile", "step", "evaluation", "save", "background save")
THIRTY = random.Random(17).sample(PHASES * 5, 30)
PARTS = (("parallel.dp=1", "model.num_layers=1"), ("parallel.dp=2", "model.num_layers=1"), ("parallel.pp=2",))
"""Of ten moments each."""
LENGTHS = {"start-up": 400, "compile": 300, "step": 3, "evaluation": 4, "save": 3, "background save": 1}
"""How long into a phase the signal comes at most, in ticks of the processes' time, so that no clock decides."""
TRIES = 8
"""Runs that may leave the phase before the signal is sent; what is promised holds for each of them, too."""
STEPS = ("train.max_steps=90", "train.eval_every=3", "train.eval_batches=8", "checkpoint.every=4", "log.every=1")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for kernels, which the undisturbed run compiles; `test_stop.py` has a signal come in that."""
    return tmp_path_factory.mktemp("compiled")


def phases_of(told: Sequence[Moment], run: Path) -> set[str]:
    """What a process is doing whose rank 0 has told this so far."""
    if not told or told[-1].kind == "start":
        return {"start-up"}
    kind = told[-1].kind
    found = {kind} & {"evaluation", "save"}
    if kind == "step":
        found.add("compile" if sum(each.kind == "step" for each in told) == 1 else "step")
    begun, ended = ({each.step for each in told if each.kind == kind} for kind in ("staged", "saved"))
    if any(not path_of(run, step).exists() for step in begun - ended):
        found.add("background save")
    return found


def spent(process: "subprocess.Popen[str]") -> int:
    """Processor time of a run, in ticks."""
    return sum(map(ticks, [process.pid, *children(process.pid)]))


def stop_in(phase: str, process: "subprocess.Popen[str]", folder: Path, run: Path, chosen: random.Random) -> bool:
    """Send SIGTERM to a run, or to all its processes, somewhere in a phase; returns whether that is where it was."""
    before, deadline = len(moments(folder, 0)), time.monotonic() + LONGEST

    def is_there() -> bool:
        return phase in phases_of(moments(folder, 0)[before:], run)

    while not is_there():
        assert pause(process, deadline), f"the run ended before {phase}"
    until = spent(process) + chosen.randrange(LENGTHS[phase])
    while spent(process) < until and is_there():
        assert pause(process, deadline), f"the run ended in {phase}"
    (os.killpg if chosen.random() < 0.5 else os.kill)(process.pid, signal.SIGTERM)
    return is_there()


def check_stopped(process: "subprocess.Popen[str]", run: Path, phase: str) -> None:
    """It has ended as it should, and what it has made is saved."""
    code, output, error = end_of(process)
    assert error == ""
    if code == -signal.SIGTERM:  # Python itself was being started
        assert (phase, output) == ("start-up", "")
    else:
        assert code == 0, output
        assert output.count("Stopped by SIGTERM ") == 1
    made = [step for step, _ in losses(run)] if (run / "metrics.jsonl").exists() else []
    saved = newest(run)
    assert made == list(range(1, (saved.step if saved else 0) + 1))
    if saved:
        check_checkpoints(run)


@pytest.mark.sweep
@pytest.mark.skipif(not shutil.which("c++"), reason="train.compile needs a C++ compiler")
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_thirty_random_moments(
    config_file: Path, tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Each phase five times."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    options = settings(*STEPS, *PARTS[part], "train.compile=true")
    whole = undisturbed(config_file, tmp_path / "whole", *options)
    run, told, chosen = tmp_path / "run", tmp_path / "told", random.Random(part)
    for phase in THIRTY[10 * part : 10 * part + 10]:
        for _ in range(TRIES):
            more = settings(beacon(told), f"checkpoint.async_save={phase == 'background save'}".lower())
            process = start(command(config_file, run, *options, *more, "--resume=auto"))
            is_hit = stop_in(phase, process, told, run, chosen)
            check_stopped(process, run, phase)
            if is_hit:
                break
        else:
            pytest.fail(f"no signal came in the phase {phase}")
    rest = subprocess.run(command(config_file, run, *options, "--resume=auto"), capture_output=True, timeout=LONGEST)
    assert rest.returncode == 0, rest.stderr
    assert record(run) == whole
