"""What `threefold doctor` prints."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from threefold.byte_sizes import format_bytes
from threefold.cli.data_view import print_table

if TYPE_CHECKING:
    from threefold.plan.doctor.examination import Examination
    from threefold.plan.hardware.entry import Hardware

_MARKS = {"error": "Error", "warning": "Warning", "note": "Note"}
_PAIRS = {"pairs": "all_reduce, pairs", "send": "send of cp's ring, pairs", "stages": "send of pp's stages, pairs"}


def print_examination(found: "Examination", entry: "Hardware | None", saved: Path | None) -> None:
    """Tables of what was found, and what is wrong in words."""
    machine = found.machine
    backends = ", ".join(name for name, there in machine.backends.items() if there)
    rows: list[tuple[str, ...]] = [
        ("processor", f"{machine.processor}, of {machine.machine_cores}"),
        ("memory", f"{format_bytes(machine.memory)}, swap {format_bytes(machine.swap)}"),
        ("/dev/shm", f"{format_bytes(machine.shared_memory)} free"),
        *((f"GPU {number}", gpu.name) for number, gpu in enumerate(machine.gpus)),
        ("system", machine.system),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
        ("backends", backends or "none"),
        ("C compiler", machine.compiler or "none"),
        ("open files", f"{machine.open_files:,} a process"),
    ]
    if found.disk is not None:
        speed, free = format_bytes(int(found.disk.bandwidth)), format_bytes(found.disk.free)
        rows.append(("disk", f"{found.disk.folder}: {speed}/s written, {free} free"))
    print_table((machine.host, ""), rows)
    print_table(
        ("axis", "ranks of this host", "ranks of other hosts"),
        [(route.axis, route.here, route.hosts) for route in found.routes],
    )
    _print_products(found)
    _print_collectives(found)
    for finding in found.findings:
        typer.echo(f"{_MARKS[finding.severity]}: {finding}")
    if not found.findings:
        typer.echo("Nothing is wrong.")
    if entry is not None and saved is not None:
        name = entry.name if saved.stem == entry.name else str(saved)
        typer.echo(f"\nSaved the hardware entry {saved}; use it with: threefold estimate CONFIG --hardware {name}")


def _print_products(found: "Examination") -> None:
    if not found.rates:
        return
    dtypes = sorted({dtype for rates in found.rates for dtype in rates.matrix}, reverse=True)
    sizes = sorted({size for rates in found.rates for by_size in rates.matrix.values() for size in by_size})
    rows: list[tuple[str, ...]] = []
    for rates in found.rates:
        for dtype in dtypes:
            of_dtype = rates.matrix.get(dtype, {})
            cells = [_three_digits(of_dtype[size] / 1e9) if size in of_dtype else "" for size in sizes]
            bandwidth = _three_digits(rates.memory_bandwidth / 1e9) if dtype == dtypes[0] else ""
            rows.append((f"{rates.ranks}", str(rates.threads), dtype, *cells, bandwidth))
    header = ("ranks", "threads", "dtype", *(f"{size}²" for size in sizes), "memory, GB/s")
    print_table(header, rows)
    typer.echo("GFLOP/s of each rank in products of square matrices, and its memory bandwidth, while all compute.")


def _print_collectives(found: "Examination") -> None:
    rows: list[tuple[str, ...]] = []
    for rates in found.rates:
        for name, each in rates.collectives.items():
            speed = _three_digits(each.bandwidth / 1e9)
            rows.append((str(rates.ranks), _PAIRS.get(name, name), each.transport, f"{1e6 * each.latency:,.0f}", speed))
    if rows:
        print_table(("ranks", "collective", "over", "latency, µs", "GB/s"), rows)
        nbytes = format_bytes(found.rates[-1].collectives["all_reduce"].nbytes)
        typer.echo(f"Of {nbytes} on all ranks at the same time; pairs: of groups of two ranks.\n")


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
