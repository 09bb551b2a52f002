"""Tokens per second of eight ranks on this machine's cores, beside one process that has them all.

    python benchmarks/layouts.py [--dtype fp32] [--rounds 5] [--steps 2] [--layout 2,2,2 ...]

The cores do the same arithmetic either way, so a ratio of one would mean that splitting costs nothing.
"""

import argparse
import statistics

import shape
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table

LAYOUTS = ["2,2,2", "8,1,1", "1,8,1", "1,1,8"]
GOAL = 0.75  # for dp 2, tp 2, pp 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the medians are printed")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--layout", nargs="+", default=LAYOUTS, metavar="DP,TP,PP")
    arguments = parser.parse_args()
    contestants = [_contestant(arguments.dtype, layout) for layout in ["1,1,1", *arguments.layout]]
    seconds = contest(contestants, arguments.rounds, arguments.steps)
    console = Console()
    console.print(f"{shape.describe()}, {arguments.dtype}\n{hardware_line()}", highlight=False, soft_wrap=True)
    console.print(_table(seconds))


def _contestant(dtype: str, layout: str) -> Contestant:
    dp, tp, pp = map(int, layout.split(","))
    # What a rank takes in one go is as in one process; a replica with fewer sequences than that takes what it has.
    micro_batch = min(shape.MICRO_BATCH, shape.GLOBAL_BATCH // dp)
    settings = shape.config(dtype, dp, tp, pp, micro_batch_size=micro_batch)
    return Contestant(layout, shape.threefold_step, (settings,), ranks=dp * tp * pp)


def _table(seconds: dict[str, list[float]]) -> Table:
    table = Table(title=f"Splitting (goal for 2,2,2: {GOAL} of one process)", title_justify="left")
    for heading in ("dp, tp, pp", "tokens/s", "of one process"):
        table.add_column(heading, justify="right")
    whole = seconds["1,1,1"]
    for layout, values in seconds.items():
        speed = shape.TOKENS_PER_STEP / statistics.median(values)
        table.add_row(layout.replace(",", ", "), f"{speed:,.0f}", f"{ratio(values, whole):.2f}")
    return table


if __name__ == "__main__":
    main()
