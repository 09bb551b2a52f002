"""Start-up of a run on eight ranks, and what reading the data costs of its steps.

    python benchmarks/start.py [--steps 30]

Runs `threefold train` itself, dp 2 · tp 2 · pp 2, on tokens made from this Python's own documentation, in a temporary
folder. Start-up is from the start of the command to the end of the first step, imports included.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shape
import yaml
from hardware import hardware_line
from rich.console import Console
from rich.table import Table

START_GOAL, READING_GOAL = 15.0, 0.01  # seconds; share of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of the run")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        threefold("data", "sample", str(folder / "text"))
        tokens = folder / "tokens"
        threefold("data", "prepare", str(folder / "text"), "--out", str(tokens), "--vocab-size", str(shape.VOCAB))
        settings = shape.config("fp32", 2, 2, 2, max_steps=steps, eval_every=0).sections()
        settings["data"] = {"path": str(tokens), "sequence_length": shape.SEQUENCE}
        settings["log"] = {"every": 1}
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
        start, log = first_step(folder)
    console = Console()
    console.print(f"{shape.describe()}, dp 2 · tp 2 · pp 2\n{hardware_line()}", highlight=False, soft_wrap=True)
    console.print(table(start, reading_share(log)))


def threefold(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "threefold", *arguments], check=True, stdout=subprocess.DEVNULL)


def first_step(folder: Path) -> tuple[float, str]:
    """Seconds until the first step had been made, and the run's step log."""
    command = [sys.executable, "-m", "threefold", "train", str(folder / "run.yaml"), "--run-dir", str(folder / "run")]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics = folder / "run" / "metrics.jsonl"
    seconds = None
    while process.poll() is None and seconds is None:
        if metrics.exists() and metrics.read_text().count("\n"):
            seconds = time.perf_counter() - started
        time.sleep(0.02)
    if process.wait() or seconds is None:
        raise SystemExit(f"the run ended with status {process.returncode}")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert steps[0]["step"] == 1
    return seconds, (folder / "run" / "train.log").read_text()


def reading_share(log: str) -> float:
    """Time spent waiting for data over the time of the steps, from the second step on."""
    lines = [line for line in log.splitlines() if "avg_reader_cost" in line][1:]
    fields = [dict(part.split(": ", 1) for part in line.split(", ") if ": " in part) for line in lines]
    reading = sum(float(each["avg_reader_cost"].split()[0]) for each in fields)
    return reading / sum(float(each["avg_batch_cost"].split()[0]) for each in fields)


def table(start: float, reading: float) -> Table:
    shown = Table(title="A run of eight ranks", title_justify="left")
    for heading in ("", "measured", "goal"):
        shown.add_column(heading, justify="right" if heading else "left")
    shown.add_row("start-up to the end of the first step", f"{start:.1f} s", f"{START_GOAL:.0f} s")
    shown.add_row("waiting for data, of a step", f"{reading:.3%}", f"{READING_GOAL:.0%}")
    return shown


if __name__ == "__main__":
    main()
