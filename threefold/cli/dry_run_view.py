"""Output of `threefold dry-run`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from threefold.byte_sizes import format_bytes
from threefold.cli.data_view import print_table
from threefold.comm.layout import Layout

if TYPE_CHECKING:
    from threefold.config import Config
    from threefold.planner.dry_step import DryRunReport
    from threefold.planner.hardware import Hardware


def print_reports(config: "Config", reports: "Sequence[DryRunReport]", hardware: "Hardware | None") -> None:
    """Print memory, collectives and floating-point operations of each rank, and whether it fits."""
    layout, train = Layout.from_config(config.parallel), config.train
    zero = f", zero {config.parallel.zero}" if config.parallel.zero else ""
    each = f"{train.gradient_accumulation_steps} of {train.micro_batch_size}"
    typer.echo(f"Layout: {layout}{zero}, {_count(layout.world_size, 'rank')}; {config.precision.dtype}.")
    typer.echo(f"One step: {train.global_batch_size:,} samples, in micro-batches of each replica: {each}.")
    places = [(f"{report.rank:,}", str(report.coordinates["pp"])) for report in reports]
    work: list[tuple[str, ...]] = [
        (*place, _layers(report.layers), f"{report.parameters:,}", f"{report.flops / 1e12:,.3f}")
        for place, report in zip(places, reports, strict=True)
    ]
    print_table(("rank", "stage", "layers", "parameters", "TFLOP"), work)
    memory: list[tuple[str, ...]] = [
        (*place, *map(format_bytes, _amounts(report))) for place, report in zip(places, reports, strict=True)
    ]
    print_table(("rank", "stage", "weights", "gradients", "optimizer", "activations", "peak"), memory)
    typer.echo("At the peak, by the causes of threefold estimate, which adds what an allocator loses (fragmentation).")
    if collectives := _collectives(reports):
        print_table(("ranks", "axis", "collective", "count", "bytes"), collectives)
    typer.echo(_verdict(reports, hardware))


def reports_as_json(config: "Config", reports: "Sequence[DryRunReport]", hardware: "Hardware | None") -> str:
    largest = max(report.peak_bytes for report in reports)
    document: dict[str, Any] = {
        "layout": asdict(Layout.from_config(config.parallel)),
        "world_size": Layout.from_config(config.parallel).world_size,
        "peak_bytes": largest,
        "ranks": [_as_told(report) for report in reports],
    }
    if hardware is not None:
        document["hardware"] = hardware.name
        document["fits"] = largest <= _usable(hardware)
    return json.dumps(document, indent=2)


def _as_told(report: "DryRunReport") -> dict[str, Any]:
    """Return the numbers of a report; the peak is broken down only by the causes of an estimate."""
    told = {**asdict(report), "causes": {**report.causes, "fragmentation": 0}}
    return {name: value for name, value in told.items() if name not in ("at_peak", "activation_bytes")}


def _amounts(report: "DryRunReport") -> tuple[int, ...]:
    return (*report.causes.values(), report.peak_bytes)


def _collectives(reports: "Sequence[DryRunReport]") -> "list[tuple[str, ...]]":
    """Return a row for each kind of collective; consecutive ranks with the same collectives share theirs."""
    rows: list[tuple[str, ...]] = []
    for collectives, alike in groupby(reports, key=lambda report: list(report.collectives)):
        ranks = [report.rank for report in alike]
        named = f"{ranks[0]:,}" if len(ranks) == 1 else f"{ranks[0]:,} to {ranks[-1]:,}"
        for number, each in enumerate(collectives):
            first = "" if number else named
            rows.append((first, each.axis, each.operation, f"{each.count:,}", format_bytes(each.nbytes)))
    return rows


def _verdict(reports: "Sequence[DryRunReport]", hardware: "Hardware | None") -> str:
    largest = max(reports, key=lambda report: report.peak_bytes)
    needs = f"Rank {largest.rank:,} needs {format_bytes(largest.peak_bytes)} at its peak"
    if hardware is None:
        return f"{needs}; buffers inside kernels and of the communication library are not counted."
    verb = "fits" if largest.peak_bytes <= _usable(hardware) else "does not fit"
    room = f"{format_bytes(_usable(hardware))} that tensors may have of {hardware.title}"
    return f"{needs}, which {verb} into the {room}."


def _usable(hardware: "Hardware") -> int:
    from threefold.planner.estimate import usable_memory

    return usable_memory(hardware)


def _layers(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"
