"""Measure tokens per second of one process on all cores: Threefold and `transformers`' GPT-2, same shape and optimizer.

    pip install -e '.[benchmark]'
    python benchmarks/single_process.py [--rounds 5] [--steps 2]

`transformers` is set up as its users would: scaled-dot-product attention, no dropout, fused AdamW, gradient
accumulation and clipping; bf16 as autocast over fp32 weights. Threefold's bf16 computes with bf16 weights, keeps fp32
master weights and accumulates gradients in fp32. `compiled` is Threefold with `train.compile: true`, whose first step
takes some twenty seconds longer. Each runs in its own process, and they take turns.
"""

import argparse
import statistics

import shape
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table

GOALS = {"fp32": 1.2, "bf16": 1.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the medians are printed")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    arguments = parser.parse_args()
    contestants = [
        contestant
        for dtype in GOALS
        for contestant in (
            Contestant(f"transformers {dtype}", shape.transformers_step, (dtype,), launched=False),
            Contestant(f"Threefold {dtype}", shape.threefold_step, (shape.config(dtype),)),
            Contestant(f"compiled {dtype}", shape.threefold_step, (shape.config(dtype, compile=True),)),
        )
    ]
    seconds = contest(contestants, arguments.rounds, arguments.steps)
    console = Console()
    console.print(f"{shape.describe()}\n{hardware_line()}", highlight=False, soft_wrap=True)
    console.print(_table(seconds))


def _table(seconds: dict[str, list[float]]) -> Table:
    table = Table(title="One process", title_justify="left")
    for heading in ("", "transformers tokens/s", "Threefold tokens/s", "ratio", "compiled tokens/s", "ratio", "goal"):
        table.add_column(heading, justify="right")
    for dtype, goal in GOALS.items():
        theirs, ours, compiled = (seconds[f"{name} {dtype}"] for name in ("transformers", "Threefold", "compiled"))
        speeds = [f"{shape.TOKENS_PER_STEP / statistics.median(values):,.0f}" for values in (theirs, ours, compiled)]
        ratios = [f"{ratio(values, theirs):.2f}" for values in (ours, compiled)]
        table.add_row(dtype, *speeds[:2], ratios[0], speeds[2], ratios[1], f"{goal}")
    return table


if __name__ == "__main__":
    main()
