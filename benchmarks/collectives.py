"""Measure all-reduce through gloo and through shared memory, between processes of this host.

    python benchmarks/collectives.py [--rounds 5] [--dtype bf16]

Runs two ranks in one group; eight ranks in four groups of two that work at the same time, as in a run with dp 4 · tp 2;
and eight ranks in one group, with one thread each. The two backends take turns; the medians over the rounds are
printed. Processor seconds (user and system, of all ranks of a group) are the cost on a busy host; the wall clock is the
wait of the slowest rank. (`PYTHONPATH=CHECKOUT` measures another checkout.)
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hardware import hardware_line
from rich.console import Console
from rich.table import Table

from threefold.cpu.shared_memory import SharedMemoryGroup, over_shared_memory

SIZES = [1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SECONDS_PER_MEASUREMENT = 0.2
Measurement = tuple[float, float]
"""Wall seconds, and processor seconds of all ranks, for one operation of one group."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind, medians are printed")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    arguments = parser.parse_args()
    console = Console()
    console.print(hardware_line())
    for world_size, group_size in ((2, 2), (8, 2), (8, 8)):
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.spawn(
                _worker,
                (world_size, group_size, arguments.rounds, arguments.dtype, folder),
                nprocs=world_size,
                join=False,
                daemon=True,
            )
            while not context.join():
                pass
            results = torch.load(Path(folder) / "results")
        console.print(_table(arguments.dtype, world_size, group_size, results))


def _worker(rank: int, world_size: int, group_size: int, rounds: int, dtype: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    starts = range(0, world_size, group_size)
    group = [dist.new_group(list(range(start, start + group_size))) for start in starts][rank // group_size]
    (shared,) = over_shared_memory([group])
    if not isinstance(shared, SharedMemoryGroup):
        raise SystemExit("the ranks cannot share memory on this host")
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "gloo": lambda tensor: dist.all_reduce(tensor, group=group),
        "shared": lambda tensor: dist.all_reduce(tensor, group=shared),
    }
    results = {}
    for size in SIZES:
        measured: dict[str, list[Measurement]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, all_reduce in ways.items():
                tensor = torch.zeros(size // DTYPES[dtype].itemsize, dtype=DTYPES[dtype])
                measured[way].append(_measure(all_reduce, tensor, group_size))
        results[size] = {
            way: tuple(statistics.median(values) for values in zip(*measured[way], strict=True)) for way in ways
        }
    if rank == 0:
        torch.save(results, Path(folder) / "results")
    dist.barrier()
    os._exit(0)


def _measure(all_reduce: Callable[[torch.Tensor], object], tensor: torch.Tensor, group_size: int) -> Measurement:
    """Time as many operations as fit the time of a measurement, the same number on every rank."""
    started = time.perf_counter()
    for _ in range(10):
        all_reduce(tensor)
    estimate = torch.tensor((time.perf_counter() - started) / 10)
    dist.all_reduce(estimate, op=dist.ReduceOp.MAX)
    count = max(10, int(SECONDS_PER_MEASUREMENT / estimate.item()))
    dist.barrier()
    started, processor = time.perf_counter(), _processor_seconds()
    for _ in range(count):
        all_reduce(tensor)
    wall = torch.tensor((time.perf_counter() - started) / count, dtype=torch.float64)
    used = torch.tensor((_processor_seconds() - processor) / count, dtype=torch.float64)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return wall.item(), used.item() * group_size / dist.get_world_size()


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _table(dtype: str, world_size: int, group_size: int, results: dict[int, dict[str, Measurement]]) -> Table:
    count = world_size // group_size
    groups = f"{count} groups of {group_size} ranks at the same time" if count > 1 else f"a group of {group_size} ranks"
    table = Table(title=f"{dtype} all-reduce, {groups}", title_justify="left")
    for heading in ("KB", "gloo ms", "shared ms", "ratio", "gloo CPU ms", "shared CPU ms", "ratio"):
        table.add_column(heading, justify="right")
    for size, ways in results.items():
        cells = [f"{size >> 10}"]
        for gloo, shared in zip(ways["gloo"], ways["shared"], strict=True):
            cells += [f"{gloo * 1e3:.3f}", f"{shared * 1e3:.3f}", f"{gloo / shared:.1f}"]
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()
