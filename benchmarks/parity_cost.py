"""Measure what the recorder of `threefold_parity` costs in a step of a plain GPT-2, and how large its record is.

    python benchmarks/parity_cost.py [--batch 4] [--length 128 512] [--rounds 3]

Recorded and plain steps take turns, in one process with all cores; `off` is a recorder without a folder. A recorded
turn is three steps, which is the default.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from hardware import hardware_line
from plain_gpt import PlainGPT
from rich.console import Console
from rich.table import Table

import threefold_parity as parity

STEPS = 3
VOCAB = 50257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--length", type=int, nargs="+", default=[128, 512], help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, of which the medians are printed")
    arguments = parser.parse_args()
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    table = Table(title="gpt2-124m, fp32, AdamW", title_justify="left")
    for heading in ("tokens a step", "plain, ms", "off", "recorded (goal 1.3)", "record, MB"):
        table.add_column(heading, justify="right")
    for length in arguments.length:
        seconds, size = measure(arguments.batch, length, arguments.rounds)
        plain = statistics.median(seconds["plain"])
        ratios = [f"{statistics.median(seconds[kind]) / plain:.2f}" for kind in ("off", "recorded")]
        table.add_row(f"{arguments.batch} × {length}", f"{1000 * plain:,.0f}", *ratios, f"{size / 1e6:,.1f}")
    console.print(table)


def measure(batch: int, length: int, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each step by kind, and the bytes of a record of three steps."""
    torch.manual_seed(0)
    model = PlainGPT(12, 768, 12, 3072, VOCAB, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    seconds: dict[str, list[float]] = {"plain": [], "off": [], "recorded": []}
    size = 0
    for turn in range(rounds + 1):
        for kind, found in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                where = Path(folder) / "record" if kind == "recorded" else None
                recorder = None if kind == "plain" else parity.Recorder(model, optimizer, folder=where, steps=STEPS)
                for _ in range(STEPS):
                    rows = torch.randint(VOCAB, (batch, length + 1), generator=generator)
                    begun = time.perf_counter()
                    loss = model(rows[:, :-1], rows[:, 1:])
                    loss.backward()
                    if recorder is not None:
                        recorder.after_backward(loss)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    if turn:  # the first only warms up
                        found.append(time.perf_counter() - begun)
                if where is not None:
                    size = sum(path.stat().st_size for path in where.iterdir())
    return seconds, size


if __name__ == "__main__":
    main()
