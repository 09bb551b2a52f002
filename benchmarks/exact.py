"""Measure what an exact run costs beside a plain one, in one process and on eight ranks of dp 2 · tp 2 · pp 2.

    python benchmarks/exact.py [--shape 8x256 gpt2-124m] [--dtype fp32] [--layout NAME]... [--rounds 5] [--steps 1]

Steps take turns. The vocabulary of GPT-2 is rounded up to a multiple of 64, which eight pieces divide.
"""

import argparse
import statistics
from dataclasses import replace

import shape
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from shape import SHAPES

LAYOUTS = {"one process": (1, 1, 1), "dp 2 · tp 2 · pp 2": (2, 2, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["8x256", "gpt2-124m"], choices=[*SHAPES])
    parser.add_argument("--dtype", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--layout", nargs="+", default=[*LAYOUTS], choices=[*LAYOUTS])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the medians are printed")
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn")
    arguments = parser.parse_args()
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    for name in arguments.shape:
        of = replace(SHAPES[name], vocab=-(-SHAPES[name].vocab // 64) * 64)
        table = Table(title=of.describe(), title_justify="left")
        for heading in ("", "dtype", "plain, ms a step", "exact, ms a step", "ratio (goal 1.25)"):
            table.add_column(heading, justify="right")
        for layout in arguments.layout:
            for dtype in arguments.dtype:
                dp, tp, pp = LAYOUTS[layout]
                micro = min(of.micro_batch, max(1, of.global_batch // dp // (2 * pp if pp > 1 else 1)))
                pair = []
                for kind in ("plain", "exact"):
                    config = shape.config(dtype, dp, tp, pp, of, micro_batch_size=micro, exact=kind == "exact")
                    pair.append(Contestant(kind, shape.threefold_step, (config, of), ranks=dp * tp * pp))
                seconds = contest(pair, arguments.rounds, arguments.steps)
                times = [f"{1000 * statistics.median(seconds[kind]):,.0f}" for kind in ("plain", "exact")]
                table.add_row(layout, dtype, *times, f"{ratio(seconds['plain'], seconds['exact']):.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
