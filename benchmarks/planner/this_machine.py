"""Steps of eight local ranks on this machine: estimates from the measurements of doctor, beside measured steps.

Runs only when named: it measures for some minutes, and other programs disturb it. Layouts take turns in rounds; the
fastest step of each counts.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.planner.goals import Goal
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.host import keep_freed_memory
from threefold.launch.worker import threads_per_rank
from threefold.models.family import make_model, model_plan
from threefold.planner.doctor import examine, measured_entry
from threefold.planner.estimate import estimate
from threefold.planner.hardware import Hardware
from threefold.train.step import Engine
from threefold.verify.worker_pool import WorkerPool

RANKS: Final = 8
ROUNDS, STEPS = 3, 3
LAYOUTS: Final = (
    {"dp": 8},
    {"dp": 8, "zero": 1},
    {"dp": 8, "zero": 3},
    {"dp": 4, "tp": 2},
    {"dp": 2, "tp": 4},
    {"tp": 8},
    {"dp": 4, "pp": 2},
    {"dp": 2, "pp": 4},
    {"dp": 2, "tp": 2, "pp": 2},
    {"tp": 4, "pp": 2},
    {"dp": 4, "cp": 2},
)
WORST, CORRELATION = 0.20, 0.8


def run(console: Console) -> list[Goal]:
    """Measure this machine's entry and the layouts, and compare."""
    with WorkerPool(RANKS) as pool:
        found = examine(lambda worker, args, ranks, device: pool.run(ranks, worker, None, *args)[0], Path())
        hardware = measured_entry(found)
        assert hardware is not None
        configs = [config(layout) for layout in LAYOUTS]
        measured = [float("inf")] * len(configs)
        for _ in range(ROUNDS):
            for number, each in enumerate(configs):
                measured[number] = min(measured[number], *pool.run(RANKS, fastest_step, each, STEPS))
    return compare(console, hardware, configs, measured)


def compare(console: Console, hardware: Hardware, configs: Sequence[Config], measured: Sequence[float]) -> list[Goal]:
    """Print the table, and return the goals.

    Args:
        hardware: entry of this machine.
        configs: resolved configs, one per layout.
        measured: seconds of a step of each config.
    """
    estimated = [estimate(each, hardware).step_seconds for each in configs]
    table = Table(title=f"A step of {RANKS} ranks on {hardware.title}")
    for heading in ("layout", "measured, ms", "estimated, ms", "error"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    errors = [guess / real - 1 for guess, real in zip(estimated, measured, strict=True)]
    for each, real, guess, error in zip(configs, measured, estimated, errors, strict=True):
        zero = f", zero {each.parallel.zero}" * bool(each.parallel.zero)
        name = f"{Layout.from_config(each.parallel)}{zero}"
        table.add_row(name, f"{1e3 * real:,.0f}", f"{1e3 * guess:,.0f}", f"{error:+.1%}")
    console.print(table)
    return [
        Goal("worst error of a step on this machine", max(map(abs, errors)), WORST, unit="%"),
        Goal("rank correlation of layouts on this machine", rank_correlation(estimated, measured), CORRELATION, True),
    ]


def config(parallel: dict[str, int]) -> Config:
    """Return the resolved config of a small GPT in a layout."""
    given: dict[str, Any] = {
        "model": {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 2048},
        "data": {"path": "none", "sequence_length": 128},
        "parallel": parallel,
        "train": {"global_batch_size": 32, "micro_batch_size": 2, "device": "cpu"},
    }
    return resolve(Config.model_validate(given), 2048)


def fastest_step(settings: Config, steps: int) -> float:
    """Return the seconds of the fastest of `steps` steps on this rank, after a warm-up step."""
    torch.set_num_threads(threads_per_rank(RANKS))
    keep_freed_memory()  # as `threefold.train.run` does
    mesh, length = Mesh(Layout.from_config(settings.parallel)), settings.data.sequence_length
    engine = Engine(lambda: make_model(settings.model), model_plan(settings.model, length), mesh, settings)
    rows = torch.arange(settings.train.global_batch_size).chunk(mesh.dp.size)[mesh.dp.index]
    tokens = torch.randint(settings.model.vocab_size, (len(rows), length), generator=torch.Generator().manual_seed(3))
    fastest = float("inf")
    for number in range(1 + steps):
        mesh.world.barrier()
        started = time.perf_counter()
        engine.train_step(Batch(tokens, tokens, rows), number)
        mesh.world.barrier()
        if number:
            fastest = min(fastest, time.perf_counter() - started)
    return fastest


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's coefficient: 1 for the same order, -1 for the opposite one; values must be distinct."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    count = len(first)
    apart = sum((one - other) ** 2 for one, other in zip(*places, strict=True))
    return 1 - 6 * apart / (count * (count**2 - 1))
