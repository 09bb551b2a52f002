"""Measure the start-up of a run on eight ranks or many, and the share of its steps spent reading data.

    python benchmarks/start.py [--ranks 8] [--steps 30] [--rounds 3] [--before CHECKOUT]

Runs `threefold train` itself, on tokens from this Python's own documentation, in a temporary folder: eight ranks as dp
2 · tp 2 · pp 2; 64 as dp 4 · tp 4 · pp 4, with a model so small that the ranks themselves take the time. Start-up lasts
from the start of the command to the end of the first step, imports included. The losses are compared with those of one
process.

With --before, another checkout of this repository takes turns. The Python files of both are compiled first, like those
of an installed package. Finally one of 1,024 ranks creates its process groups, simulated in this process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shape
import yaml
from hardware import hardware_line
from rich.console import Console
from rich.table import Table

from threefold.comm.layout import Layout
from threefold.models.gpt.sharding import gpt_plan
from threefold.parallel.pipeline.partition import stage_map
from threefold.parallel.pipeline.stage import TiedWeights
from threefold.planner.dry_run import FakeMesh
from threefold.torch_private.fake import fake_process_group

LAYOUTS = {8: (2, 2, 2), 64: (4, 4, 4)}
SMALL = {"hidden_size": 64, "ffn_hidden_size": 256, "max_position_embeddings": 64}
READING_GOAL = 0.01  # share of a step
HERE = Path(__file__).resolve().parents[1]


@dataclass
class Runs:
    """Times of the runs of one checkout, in seconds from the start of the command.

    Attributes:
        first, last: end of the first step and of the last one.
        whole: end of the command, which writes a checkpoint and a picture.
        reading: time spent waiting for data over the time of the steps, from the second step on, of the latest run.
    """

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reading: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, choices=sorted(LAYOUTS))
    parser.add_argument("--steps", type=int, default=30, help="steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each checkout, of which the medians are printed")
    parser.add_argument("--before", type=Path, help="another checkout of this repository, to compare with")
    arguments = parser.parse_args()
    dp, tp, pp = LAYOUTS[arguments.ranks]
    trees = {"this checkout": HERE} | ({"before": arguments.before.resolve()} if arguments.before else {})
    runs = {name: Runs() for name in trees}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.ranks, arguments.steps)
        for tree in trees.values():
            compile_files(folder, tree)
        for number in range(arguments.rounds):
            for each in list(trees)[:: 1 if number % 2 else -1]:
                train(folder, trees[each], f"{each} {number}", runs[each], (dp, tp, pp))
        alone = Runs()
        train(folder, HERE, "alone", alone, (1, 1, 1))
    console = Console()
    described = shape.describe() if arguments.ranks == 8 else f"{shape.describe()}; but {SMALL}, sequence 64"
    console.print(f"{described}, dp {dp} · tp {tp} · pp {pp}\n{hardware_line()}", highlight=False, soft_wrap=True)
    console.print(table(arguments.ranks, arguments.steps, runs, alone))
    console.print(f"Process groups of a rank of 1,024, simulated: {1e3 * groups():.0f} ms (goal 1 s)", highlight=False)


def prepare(folder: Path, ranks: int, steps: int) -> None:
    """Write tokens, and the settings of a run without its layout."""
    call(HERE, folder, "data", "sample", str(folder / "text"))
    tokens = folder / "tokens"
    call(HERE, folder, "data", "prepare", str(folder / "text"), "--out", str(tokens), "--vocab-size", str(shape.VOCAB))
    settings = shape.config("fp32", max_steps=steps, eval_every=0).sections()
    settings["data"] = {"path": str(tokens), "sequence_length": shape.SEQUENCE}
    settings["log"] = {"every": 1}
    del settings["parallel"], settings["train"]["gradient_accumulation_steps"]
    if ranks > 8:
        settings["model"] |= SMALL
        settings["data"]["sequence_length"] = SMALL["max_position_embeddings"]
        settings["train"]["micro_batch_size"] = 2
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))


def environment(folder: Path, tree: Path) -> dict[str, str]:
    """Return the environment of a checkout's command, with its compiled files kept."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}


def call(tree: Path, folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "threefold", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(folder, tree), cwd=folder)


def compile_files(folder: Path, tree: Path) -> None:
    run = folder / "warm-up"
    call(
        tree, folder, "train", str(folder / "run.yaml"), "--run-dir", str(run / tree.name), "--set", "train.max_steps=1"
    )


def train(folder: Path, tree: Path, name: str, runs: Runs, layout: tuple[int, int, int]) -> None:
    """Train once and record the times."""
    run = folder / name
    axes = [f"--set=parallel.{axis}={size}" for axis, size in zip(("dp", "tp", "pp"), layout, strict=True)]
    command = [sys.executable, "-m", "threefold", "train", str(folder / "run.yaml"), "--run-dir", str(run), *axes]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment(folder, tree), cwd=folder)
    metrics, written = run / "metrics.jsonl", [0.0]
    while process.poll() is None:
        lines = metrics.read_text().count('"loss": ') if metrics.exists() else 0
        written += [time.perf_counter() - started] * (lines + 1 - len(written))
        time.sleep(0.01)
    runs.whole.append(time.perf_counter() - started)
    if process.returncode or len(written) < 2:
        raise SystemExit(f"the run ended with status {process.returncode}")
    steps = [json.loads(line) for line in metrics.read_text().splitlines() if '"loss": ' in line]
    assert steps[0]["step"] == 1
    runs.first.append(written[1])
    runs.last.append(written[-1])
    runs.losses = [step["loss"] for step in steps]
    runs.reading = reading_share((run / "train.log").read_text())


def reading_share(log: str) -> float:
    """Return the time spent waiting for data over the time of the steps, from the second step on."""
    lines = [line for line in log.splitlines() if "avg_reader_cost" in line][1:]
    fields = [dict(part.split(": ", 1) for part in line.split(", ") if ": " in part) for line in lines]
    reading = sum(float(each["avg_reader_cost"].split()[0]) for each in fields)
    return reading / sum(float(each["avg_batch_cost"].split()[0]) for each in fields)


def table(ranks: int, steps: int, runs: dict[str, Runs], alone: Runs) -> Table:
    shown = Table(title=f"A run of {ranks} ranks", title_justify="left")
    for heading in ("", *runs, "goal"):
        shown.add_column(heading, justify="right" if heading else "left")

    def row(name: str, values: list[str], goal: str = "") -> None:
        shown.add_row(name, *values, goal)

    def seconds(values: list[float]) -> str:
        return f"{statistics.median(values):.1f} s"

    row("start-up to the end of the first step", [seconds(each.first) for each in runs.values()], "4 s" * (ranks == 8))
    last = [seconds(each.last) for each in runs.values()]
    row(f"to the end of step {steps}", last, "15 s" * (ranks == 64 and steps == 4))
    row("to the end of the command", [seconds(each.whole) for each in runs.values()])
    row("waiting for data, of a step", [f"{each.reading:.3%}" for each in runs.values()], f"{READING_GOAL:.0%}")
    row("losses differ from one process's by", [f"{departure(each, alone):.1e}" for each in runs.values()])
    return shown


def departure(runs: Runs, alone: Runs) -> float:
    """Return the largest relative difference of a loss."""
    return max(abs(one / other - 1) for one, other in zip(runs.losses, alone.losses, strict=True))


def groups() -> float:
    """Return the seconds that one rank of 1,024 takes to create its mesh and the groups for tied weights and ZeRO."""
    settings = shape.config("fp32", pp=8)
    plan = gpt_plan(settings.model, shape.SEQUENCE)
    stages = stage_map(plan, settings)
    taken: list[Any] = []
    for _ in range(3):
        with fake_process_group(0, 1024):
            started = time.perf_counter()
            mesh = FakeMesh(Layout(dp=16, tp=8, pp=8))
            TiedWeights(plan, stages, mesh)
            mesh.shard_and_replica_axes(2)
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
