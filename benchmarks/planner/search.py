"""Search of layouts: their number, the duration of the whole command, and the result."""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.planner.goals import Goal

_TRILLION: Final = {"num_layers": 128, "hidden_size": 25600, "num_attention_heads": 160, "vocab_size": 51200}
SEARCHES: Final = (
    ("175B", {"preset": "gpt3-175b"}, 1536, 1024, 2.0),
    ("1T", _TRILLION, 3072, 16384, 5.0),
)
"""Name of a model, its settings, sequences of a step, GPUs, and the seconds that the command may take."""
HARDWARE: Final = "h100"


def searched(model: dict[str, Any], batch: int, gpus: int) -> tuple[float, dict[str, Any]]:
    """Return the seconds of `threefold plan` in its own process (the faster of two runs), and its document."""
    sections = {
        "data": {"path": "tokens", "sequence_length": 2048},
        "model": model,
        "train": {"global_batch_size": batch, "max_steps": 1000},
        "precision": {"dtype": "bf16"},
    }
    seconds, output = [], ""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "model.yaml"
        config.write_text(yaml.safe_dump(sections), encoding="utf-8")
        command = [sys.executable, "-m", "threefold", "plan", str(config), "--gpus", str(gpus), "--hardware", HARDWARE]
        for _ in range(2):
            began = time.perf_counter()
            output = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout
            seconds.append(time.perf_counter() - began)
    document: dict[str, Any] = json.loads(output)
    return min(seconds), document


def run(console: Console) -> list[Goal]:
    table = Table(title=f"threefold plan on {HARDWARE}, the whole command, the faster of two")
    for heading in ("model", "GPUs", "layouts", "sound", "may fit", "evaluated", "seconds", "best", "step s", "MFU"):
        table.add_column(heading, justify="left" if heading in ("model", "best") else "right")
    goals = []
    for name, model, batch, gpus, limit in SEARCHES:
        seconds, found = searched(dict(model), batch, gpus)
        best = found["best"][0]
        counts = (f"{found[key]:,}" for key in ("layouts", "sound", "fitting", "evaluated"))
        table.add_row(
            name,
            f"{gpus:,}",
            *counts,
            f"{seconds:.2f}",
            best["layout"],
            f"{best['step_seconds']:.2f}",
            f"{best['mfu']:.1%}",
        )
        goals.append(Goal(f"plan {name} on {gpus:,} GPUs", seconds, limit, unit="s"))
    console.print(table)
    return goals
