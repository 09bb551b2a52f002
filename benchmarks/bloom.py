"""BLOOM's experiment, small: resume one checkpoint in other layouts, and print the loss of the next step in each.

    python benchmarks/bloom.py [--steps 100]

A GPT of 473,728 parameters with dropout, in fp32, on tokens from this Python's own documentation, is trained in one
process for 100 steps, in micro-batches of one sample; the README shows the row.
Nothing is timed, so no idle machine is needed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hardware import hardware_line
from rich.console import Console
from rich.table import Table

CONFIG = """\
data: {path: tokens, sequence_length: 128}
model: {num_layers: 8, hidden_size: 64, num_attention_heads: 4, hidden_dropout: 0.1, attention_dropout: 0.1}
train: {max_steps: STEPS, global_batch_size: 16, micro_batch_size: 1, eval_every: 0, device: cpu}
optimizer: {lr: 1.0e-3, decay_steps: 1000}
"""
LAYOUTS = {"one process": (1, 1, 1), "tp 4 · pp 2": (1, 4, 2), "tp 2 · pp 4": (1, 2, 4), "tp 1 · pp 8": (1, 1, 8)}
"""Layout → dp, tp, pp."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps before the checkpoint")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        losses = resumed_losses(Path(folder), steps)
    table = Table(*losses)
    table.add_row(*(f"{loss:.5f}" for loss in losses.values()))
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    console.print(f"Loss of step {steps + 1}, after a checkpoint of one process:")
    console.print(table)
    print(f"Largest relative difference: {max(losses.values()) / min(losses.values()) - 1:.1e}")


def resumed_losses(folder: Path, steps: int) -> dict[str, float]:
    """Return the loss of the first step after the checkpoint, by layout."""
    (folder / "bloom.yaml").write_text(CONFIG.replace("STEPS", str(steps)))
    _threefold(folder, "data", "sample", "text")
    _threefold(folder, "data", "prepare", "text", "--out", "tokens", "--vocab-size", "1024")
    _threefold(folder, "train", "bloom.yaml", "--run-dir", "first")
    found = {}
    for name, (dp, tp, pp) in LAYOUTS.items():
        shutil.copytree(folder / "first", folder / "copy")
        settings = {"train.max_steps": steps + 1, "parallel.dp": dp, "parallel.tp": tp, "parallel.pp": pp}
        changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        _threefold(folder, "train", "bloom.yaml", "--run-dir", "copy", "--resume", *changes)
        lines = [json.loads(line) for line in (folder / "copy" / "metrics.jsonl").read_text().splitlines()]
        found[name] = next(line["loss"] for line in lines if line["step"] == steps + 1 and "loss" in line)
        shutil.rmtree(folder / "copy")
    return found


def _threefold(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "threefold", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"threefold {' '.join(arguments)} failed: {ended.stderr}")


if __name__ == "__main__":
    main()
