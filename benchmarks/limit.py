"""Measure how close training comes to this machine's limit: model FLOPs per second over the rate of a large product.

    pip install -e '.[benchmark]'
    python benchmarks/limit.py [--shape 0.8M 8x256 gpt2-124m] [--dtype fp32 bf16] [--rounds 5] [--steps 1]
                               [--before CHECKOUT] [--ranks] [--no-peers] [--table]

The rate is measured in the same run, in turns with everything else: the faster of square products by torch and by
oneDNN, in one process with all cores. Model FLOPs do not count recompute.

Compared with Threefold: `transformers`, if installed, set up as in `single_process.py`; the same model as nanoGPT
writes it (`plain_gpt.py`); only the kernels of the latter in fp32, a lower bound for any way to call them
(`plain_kernels.py`); another checkout of Threefold; and eight ranks with one thread each. `--table` shows where the
time of a step goes, from torch's profiler, which takes some of it.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable

import shape
import torch
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from shape import SHAPES, Shape
from step_table import step_table

from threefold.ops.kernels import linear
from threefold.torch_private.tensors import onednn_linear

SIZE, PRODUCTS = 2048, 4
EIGHT = (2, 2, 2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATES = {"torch": "rate of torch", "oneDNN": "rate of oneDNN"}


def product_step(dtype: str, library: str, steps: int) -> Callable[[int], None]:
    """Return a function that multiplies square matrices in the first of the `steps` of a turn."""
    a, b = (torch.randn(SIZE, SIZE).to(DTYPES[dtype]) for _ in range(2))

    def step(number: int) -> None:
        for _ in range(0 if number % steps else PRODUCTS):
            onednn_linear(a, b, None) if library == "oneDNN" else torch.nn.functional.linear(a, b)

    linear(a, b)  # the package is loaded as in the processes that train
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the medians are printed")
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn, for the smallest shape 50 times as many")
    parser.add_argument("--before", default="", metavar="CHECKOUT", help="another checkout to measure beside this one")
    parser.add_argument("--ranks", action="store_true", help="eight ranks too")
    parser.add_argument(
        "--no-peers", action="store_true", help="neither `transformers` nor nanoGPT's way, nor its kernels"
    )
    parser.add_argument("--table", action="store_true", help="where the time goes, instead")
    arguments = parser.parse_args()
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    for name in arguments.shape:
        console.print(f"\n{SHAPES[name].describe()}", highlight=False, soft_wrap=True)
        steps = arguments.steps * (50 if name == "0.8M" else 1)
        for dtype in arguments.dtype:
            if arguments.table:
                console.print(step_table(name, dtype, steps))
                continue
            contestants = _contestants(SHAPES[name], dtype, steps, arguments)
            seconds = contest(contestants, arguments.rounds, steps)
            rates = [PRODUCTS * 2 * SIZE**3 / steps / statistics.median(seconds.pop(each)) for each in RATES.values()]
            console.print(_table(SHAPES[name], dtype, seconds, rates))


def _contestants(of: Shape, dtype: str, steps: int, arguments: argparse.Namespace) -> list[Contestant]:
    own = (shape.config(dtype, shape=of), of)
    found = [Contestant("Threefold", shape.threefold_step, own)]
    if arguments.before:
        found.append(Contestant("before", shape.threefold_step, own, tree=arguments.before))
    if not arguments.no_peers:
        if importlib.util.find_spec("transformers"):
            found.append(Contestant("transformers", shape.transformers_step, (dtype, of), launched=False))
        found.append(Contestant("plain module", shape.plain_gpt_step, (dtype, of), launched=False))
        if dtype == "fp32":
            found.append(Contestant("its kernels alone", shape.plain_kernels_step, (of,), launched=False))
    if arguments.ranks:
        dp, tp, pp = EIGHT
        micro_batch = min(of.micro_batch, max(1, of.global_batch // dp // (2 * pp)))
        split = shape.config(dtype, dp, tp, pp, shape=of, micro_batch_size=micro_batch)
        found.append(Contestant("eight ranks", shape.threefold_step, (split, of), ranks=dp * tp * pp))
    return [*found, *(Contestant(RATES[each], product_step, (dtype, each, steps), launched=False) for each in RATES)]


def _table(of: Shape, dtype: str, seconds: dict[str, list[float]], rates: list[float]) -> Table:
    title = f"{dtype}: products {max(rates) / 1e9:,.0f} GFLOP/s ({', '.join(RATES)}: " + ", ".join(
        f"{rate / 1e9:,.0f}" for rate in rates
    )
    table = Table(title=f"{title})", title_justify="left")
    for heading in ("", "ms a step", "tokens/s", "of the limit", "Threefold is"):
        table.add_column(heading, justify="right")
    for name, values in seconds.items():
        median = statistics.median(values)
        speed = of.tokens_per_step / median
        times = f"{ratio(seconds['Threefold'], values):.2f} ×" if name != "Threefold" else ""
        share = f"{speed * of.flops_per_token / max(rates):.1%}"
        table.add_row(name, f"{1000 * median:,.1f}", f"{speed:,.0f}", share, times)
    return table


if __name__ == "__main__":
    main()
