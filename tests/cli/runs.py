"""Real runs of `threefold train` that tests signal, kill and continue."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.cli.kills import pause
from tests.support import ready
from tests.support.metrics import MEASURED
from threefold.checkpoint.folder import check_whole, complete
from threefold.report.metrics import read_metrics_file

LONGEST = 600.0
"""Seconds after which a run that ought to have ended is taken for one that hangs."""


def write_config(folder: Path, tokens: Path) -> Path:
    """A config in `folder` that trains a tiny model on `tokens` for four steps."""
    path = folder / "tiny.yaml"
    path.write_text(
        f"data: {{path: {tokens}, sequence_length: 16, split: '8,2'}}\n"
        "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n"
        "train: {max_steps: 4, global_batch_size: 4, eval_every: 2, eval_batches: 1, device: cpu}\n"
        "checkpoint: {every: 2}\n"
    )
    return path


def command(config_file: Path, run: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "threefold", "train", str(config_file), "--run-dir", str(run), *options]


def start(arguments: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    """Start a command in a session of its own, as in a terminal, with Ctrl-C not ignored."""
    return subprocess.Popen(
        list(arguments),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **more,
    )


def start_ready(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """As `start`, in a fork of a process that has imported all."""
    return ready.ReadyProcess(arguments, new_session=True)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, standard output (what is left of it) and standard error."""
    output, error = process.communicate(timeout=LONGEST)
    return process.returncode, output, error


def read_until(process: subprocess.Popen[str], text: str) -> None:
    """Read the output until a line has `text`."""
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), f"the run ended without {text!r}"


def wait_for(event: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Look until something is there; only as long as the process runs."""
    deadline = time.monotonic() + LONGEST
    while not event():
        if not pause(process, deadline):
            raise AssertionError(f"the run ended first: {process.communicate()}")


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def losses(run: Path) -> list[tuple[int, float]]:
    """Step and loss of each line of the metrics; a step that appears twice is an error."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert len(dict(found)) == len(found), "a step appears twice"
    return found


def last_fingerprint(run: Path) -> str:
    """Fingerprint of an exact run's weights after its last step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: str = [line["fingerprint"] for line in lines if "fingerprint" in line][-1]
    return found


def settings(*given: str) -> list[str]:
    """Options of the command line."""
    return [word for setting in given for word in ("--set", setting)]


def record(run: Path) -> list[dict[str, object]]:
    """All steps and evaluations of a run's metrics but their speed; a line that appears twice is an error."""
    found = read_metrics_file(run / "metrics.jsonl")
    assert (found.damaged, found.repeated) == ((), ())
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in found.lines]


def undisturbed(config_file: Path, run: Path, *options: str) -> list[dict[str, object]]:
    ended = ready.run(command(config_file, run, *options), timeout=LONGEST)
    assert (ended.returncode, ended.stderr) == (0, "")
    return record(run)


def restarts(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("Restart ")]


def check_checkpoints(run: Path) -> None:
    """No checkpoint is damaged, and none is half there."""
    found = complete(run)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {each.path.name for each in found}
    for each in found:
        check_whole(each)
