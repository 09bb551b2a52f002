"""Bubbles of pipeline schedules, simulated from published pass times, beside published bubbles."""

from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.planner.goals import Goal
from threefold.planner.schedule import find_planned, program_of, share_of_ranks, simulate

DATA: Final = Path(__file__).parent / "published" / "zero_bubble.yaml"
LIMITS: Final = {"1f1b": 0.002, "zb-h1": 0.002, "zb-h2": 0.002, "interleaved": 0.01}
"""Largest absolute error of the bubbles, by schedule."""


def published_rows() -> list[dict[str, Any]]:
    """Return the rows of the data file, each with its model, numbers, times in ms and bubbles."""
    rows: list[dict[str, Any]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return rows


def predicted_bubble(row: dict[str, Any], name: str, chunks: int | None = None) -> float:
    """Return the simulated bubble of a row under a schedule; `chunks` replaces the row's."""
    pp = row["stages"]
    *passes, transfer = row["times"]
    schedule = find_planned(name)
    chunks = chunks or schedule.stages_per_rank or row["chunks"]
    times = share_of_ranks(schedule.stage_ranks(pp, chunks), *([time] * pp for time in passes))
    return simulate(program_of(schedule, pp, chunks, row["micro_batches"]), times, transfer).bubble


def run(console: Console) -> list[Goal]:
    table = Table(title="Bubble, predicted / published (Qi et al., arXiv 2401.10241; 8 stages)")
    for heading in ("model", "micro-batches", "chunks", *LIMITS):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    largest = dict.fromkeys(LIMITS, 0.0)
    for row in published_rows():
        cells = []
        for name in LIMITS:
            found, told = predicted_bubble(row, name), row["bubble"][name]
            largest[name] = max(largest[name], abs(found - told))
            cells.append(f"{found:.4f} / {told:.4f}")
        table.add_row(row["model"], str(row["micro_batches"]), str(row["chunks"]), *cells)
    console.print(table)
    console.print("Chunks are those of interleaved 1F1B: one layer each, as embedding and head count as a layer.\n")
    return [Goal(f"bubble of {name}, largest error", largest[name], limit) for name, limit in LIMITS.items()]
