"""Measure the start-up cost and the later gain of `train.compile`, in one process and on four ranks of dp 2 · tp 2.

    python benchmarks/compiling.py [--rounds 5] [--steps 1] [--dtype fp32 bf16] [--skip-start]

Steps take turns. The start is measured without earlier compilations (an empty kernel cache), for one block and for all,
and again with the cache that the former left.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shape
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table

from threefold.config import Config

LAYOUTS = {"one process": (1, 1), "dp 2 · tp 2": (2, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the medians are printed")
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn")
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--layout", nargs="+", default=[*LAYOUTS], choices=[*LAYOUTS])
    parser.add_argument("--skip-start", action="store_true", help="leave the start out")
    parser.add_argument("--first-step", metavar="LAYERS", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_step:
        return print_first_step(arguments.first_step, arguments.dtype[0])
    console = Console()
    console.print(f"{shape.describe()}\n{hardware_line()}", highlight=False, soft_wrap=True)
    console.print(_steps(arguments))
    if not arguments.skip_start:
        console.print(_starts(arguments.dtype))
    return None


def _steps(arguments: argparse.Namespace) -> Table:
    table = Table(title="Steps", title_justify="left")
    for heading in ("", "dtype", "as written, tokens/s", "compiled, tokens/s", "ratio"):
        table.add_column(heading, justify="right")
    for name in arguments.layout:
        for dtype in arguments.dtype:
            dp, tp = LAYOUTS[name]
            settings = [shape.config(dtype, dp, tp, compile=compiled) for compiled in (False, True)]
            pair = [
                Contestant(kind, shape.threefold_step, (config,), ranks=dp * tp)
                for kind, config in zip(("written", "compiled"), settings, strict=True)
            ]
            seconds = contest(pair, arguments.rounds, arguments.steps)
            written, compiled = seconds["written"], seconds["compiled"]
            speeds = [f"{shape.TOKENS_PER_STEP / statistics.median(values):,.0f}" for values in (written, compiled)]
            table.add_row(name, dtype, *speeds, f"{ratio(compiled, written):.2f}")
    return table


def _starts(dtypes: list[str]) -> Table:
    table = Table(title="What compiling adds to the first step, seconds", title_justify="left")
    for heading in ("dtype", "one block", f"{shape.LAYERS} blocks", "ratio (goal 1.3)", "started again"):
        table.add_column(heading, justify="right")
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as all_:
            block, blocks, again = (
                _added(layers, dtype, kernels)
                for layers, kernels in ((1, one), (shape.LAYERS, all_), (shape.LAYERS, all_))
            )
        table.add_row(dtype, f"{block:.1f}", f"{blocks:.1f}", f"{blocks / block:.2f}", f"{again:.1f}")
    return table


def _added(layers: int, dtype: str, kernels: str) -> float:
    command = [sys.executable, __file__, "--first-step", str(layers), "--dtype", dtype]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": kernels}
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(run.stdout.split()[-1])


def print_first_step(layers: int, dtype: str) -> None:
    """Print the seconds by which the first step of a compiled model is longer than a later one."""
    import torch.distributed as dist

    from threefold.launch.worker import Job, RankInfo, work

    with tempfile.TemporaryDirectory() as folder:
        settings = shape.config(dtype, compile=True)
        model = settings.model.model_copy(update={"num_layers": layers})
        job = Job(
            _first_step, (settings.model_copy(update={"model": model}),), device="cpu", run_dir=None, console_ranks=()
        )
        work(job, RankInfo(0, 1, 0, 1, "cpu"), dist.FileStore(str(Path(folder) / "store"), 1))


def _first_step(_: object, settings: Config) -> None:
    step, seconds = shape.threefold_step(settings), []
    for number in range(3):
        started = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - started)
    print(seconds[0] - seconds[-1])


if __name__ == "__main__":
    main()
