"""Measure recovery of a run of eight ranks, one of which is killed again and again: time to the next step, and goodput.

    python benchmarks/restart.py [--minutes 20] [--every 60]

Runs `threefold train` itself, dp 2 · tp 2 · pp 2, on tokens from this Python's own documentation, in a temporary
folder, with `train.max_restarts` and `checkpoint.memory_every: 1`. After the last kill, SIGTERM stops the run, and the
same steps are repeated undisturbed: both records must be bitwise equal.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import shape
import yaml
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from start import threefold

NEXT_STEP_GOAL, GOODPUT_GOAL = 5.0, 0.9  # seconds; share of the time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="length of the run")
    parser.add_argument("--every", type=float, default=60, help="seconds between kills")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, arguments.batch)
        waits, seconds = disturbed(folder, arguments.minutes * 60, arguments.every)
        ledger = json.loads((folder / "killed" / "goodput.json").read_text())
        found = record(folder / "killed")
        run(folder, "whole", f"train.max_steps={len(found)}").wait()
        equal = found == record(folder / "whole")
    console = Console()
    console.print(f"{shape.describe()}, but {arguments.batch} sequences a step; dp 2 · tp 2 · pp 2", highlight=False)
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    console.print(table(waits, seconds, ledger, len(found), equal))
    if not equal:
        raise SystemExit("the record is not that of the undisturbed run")


def write_config(folder: Path, batch: int) -> None:
    threefold("data", "sample", str(folder / "text"))
    tokens = folder / "tokens"
    threefold("data", "prepare", str(folder / "text"), "--out", str(tokens), "--vocab-size", str(shape.VOCAB))
    given = shape.config("fp32", 2, 2, 2, eval_every=0).given()
    given["data"] = {"path": str(tokens), "sequence_length": shape.SEQUENCE}
    given["train"] |= {"max_steps": 10**6, "max_restarts": 10**6, "global_batch_size": batch, "micro_batch_size": 1}
    given["optimizer"]["decay_steps"] = 10**5
    given["checkpoint"] = {"every": 10**5, "memory_every": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump(given))


def run(folder: Path, name: str, *settings: str) -> "subprocess.Popen[bytes]":
    more = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "threefold", "train", str(folder / "run.yaml"), "--run-dir", str(folder / name)]
    return subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL)


def disturbed(folder: Path, length: float, every: float) -> tuple[list[float], list[float]]:
    """Return the seconds from each kill to the end of the next new step, and the seconds of that step."""
    process, chosen = run(folder, "killed"), random.Random(13)
    metrics = folder / "killed" / "metrics.jsonl"
    next_step(process, metrics, 0)
    began, waits, seconds = time.perf_counter(), list[float](), list[float]()
    while (number := len(waits) + 1) * every <= length:
        time.sleep(max(0.0, began + number * every - time.perf_counter()))
        ranks = ranks_of(process.pid)
        made = record_step(metrics)
        killed = time.perf_counter()
        os.kill(chosen.choice(ranks), signal.SIGKILL)
        line = next_step(process, metrics, made + 1)
        waits.append(time.perf_counter() - killed)
        seconds.append(shape.SEQUENCE * shape_batch(folder) / line["tokens_per_second"])
    process.send_signal(signal.SIGTERM)
    if process.wait():
        raise SystemExit(f"the run ended with status {process.returncode}")
    return waits, seconds


def shape_batch(folder: Path) -> int:
    return int(yaml.safe_load((folder / "run.yaml").read_text())["train"]["global_batch_size"])


def ranks_of(parent: int) -> list[int]:
    """Return the children of a run's process: its ranks, without the children of these that copy output."""
    return [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in found if "loss" in line]


def record_step(metrics: Path) -> int:
    return int(steps_of(metrics)[-1]["step"])


def next_step(process: "subprocess.Popen[bytes]", metrics: Path, after: int) -> dict[str, Any]:
    """Wait for the first step after `after` and return its record."""
    while process.poll() is None:
        found = [line for line in steps_of(metrics) if line["step"] > after]
        if found:
            return found[0]
        time.sleep(0.02)
    raise SystemExit(f"the run ended with status {process.returncode}")


def record(folder: Path) -> list[tuple[int, float, float, int]]:
    """Return step, loss, gradient norm and tokens of each step; exit if a step is missing or appears twice."""
    found = [
        (each["step"], each["loss"], each["grad_norm"], each["tokens"]) for each in steps_of(folder / "metrics.jsonl")
    ]
    if [each[0] for each in found] != list(range(1, len(found) + 1)):
        raise SystemExit("a step is missing or was recorded twice")
    return found


def table(waits: list[float], seconds: list[float], ledger: dict[str, Any], steps: int, equal: bool) -> Table:
    shown = Table(title=f"{len(waits)} kills in {ledger['total']:.0f} s and {steps} steps", title_justify="left")
    for heading in ("", "measured", "goal"):
        shown.add_column(heading, justify="right" if heading else "left")
    before = [wait - step for wait, step in zip(waits, seconds, strict=True)]
    goal = f"{NEXT_STEP_GOAL:.0f} s"
    shown.add_row("kill → begin of the next step, median", f"{median(before):.2f} s", goal)
    shown.add_row("kill → begin of the next step, longest", f"{max(before):.2f} s", goal)
    shown.add_row("kill → end of the next step, median", f"{median(waits):.2f} s", goal)
    shown.add_row("seconds of a step, median", f"{median(seconds):.2f} s", "")
    shown.add_row("goodput", f"{ledger['steps'] / ledger['total']:.1%}", f"{GOODPUT_GOAL:.0%}")
    for part in ("steps", "repeated", "saving", "starting", "lost"):
        shown.add_row(f"  {part}", f"{ledger[part]:.1f} s", "")
    shown.add_row("record bit-equal to the undisturbed one", "yes" if equal else "no", "yes")
    return shown


if __name__ == "__main__":
    main()
