"""Measure tokens per second of eight ranks on this machine's cores, relative to one process that has them all.

    python benchmarks/layouts.py [--dtype fp32 bf16] [--rounds 5] [--steps 2] [--layout 2,2,2 1,8,1,sp ...]
                                [--shape 0.8M] [--micro-batch SAMPLES] [--before CHECKOUT]

The cores do the same arithmetic either way, so a ratio of one means that parallelism costs nothing. A layout ending in
`sp` uses sequence parallelism. With `--before`, the ranks of another checkout are compared with this one's process.
"""

import argparse
import statistics

import shape
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from shape import BASE, SHAPES, Shape

LAYOUTS = ["2,2,2", "8,1,1", "1,8,1", "1,8,1,sp", "1,1,8"]
GOALS = {("2,2,2", "fp32"): 0.95, ("2,2,2", "bf16"): 0.9, ("1,8,1", "fp32"): 0.8}
WHOLE = "1,1,1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the medians are printed")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--layout", nargs="+", default=LAYOUTS, metavar="DP,TP,PP[,sp]")
    parser.add_argument("--shape", default="8x256", choices=list(SHAPES))
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="samples that ranks of several take in one go, if not as one process"
    )
    parser.add_argument("--before", default="", metavar="CHECKOUT", help="another checkout to measure beside this one")
    arguments = parser.parse_args()
    console, of = Console(), SHAPES[arguments.shape]
    console.print(f"{of.describe()}\n{hardware_line()}", highlight=False, soft_wrap=True)
    for dtype in arguments.dtype:
        contestants = [_contestant(dtype, WHOLE, of, of.micro_batch)]
        for layout in arguments.layout:
            for tree in dict.fromkeys((arguments.before, "")):
                contestants.append(_contestant(dtype, layout, of, arguments.micro_batch or of.micro_batch, tree))
        seconds = contest(contestants, arguments.rounds, arguments.steps)
        console.print(_table(dtype, arguments.layout, of, seconds))


def _contestant(dtype: str, layout: str, of: Shape, micro_batch: int, tree: str = "") -> Contestant:
    sizes = layout.removesuffix(",sp")
    dp, tp, pp = map(int, sizes.split(","))
    # A replica with fewer sequences takes all that it has.
    settings = shape.config(dtype, dp, tp, pp, of, micro_batch_size=min(micro_batch, of.global_batch // dp))
    if sizes != layout:
        settings = settings.model_copy(
            update={"parallel": settings.parallel.model_copy(update={"sequence_parallel": True})}
        )
    name = f"{layout} before" if tree else layout
    return Contestant(name, shape.threefold_step, (settings, of), ranks=dp * tp * pp, tree=tree)


def _table(dtype: str, layouts: list[str], of: Shape, seconds: dict[str, list[float]]) -> Table:
    table = Table(title=f"{dtype}, tokens/s, and the ratio to one process", title_justify="left")
    for heading in ("dp, tp, pp", "tokens/s", "ratio", "goal", "before", "ratio", "times as fast"):
        table.add_column(heading, justify="right")
    whole = seconds[WHOLE]
    table.add_row("one process", f"{_speed(of, whole):,.0f}", "1.00")
    for layout in layouts:
        now, before = seconds[layout], seconds.get(f"{layout} before")
        goal = GOALS.get((layout, dtype)) if of == BASE else None
        cells = [layout.replace(",", ", "), f"{_speed(of, now):,.0f}", f"{ratio(now, whole):.2f}", f"{goal or ''}"]
        if before is not None:
            cells += [f"{_speed(of, before):,.0f}", f"{ratio(before, whole):.2f}", f"{ratio(now, before):.2f}"]
        table.add_row(*cells)
    return table


def _speed(of: Shape, seconds: list[float]) -> float:
    return of.tokens_per_step / statistics.median(seconds)


if __name__ == "__main__":
    main()
