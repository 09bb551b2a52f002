"""`threefold doctor`: hardware and software of this machine, its measured speed, and problems found."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from threefold.errors import UserError
from threefold.files import format_bytes, shown
from threefold.terminal import Steps, print_table

if TYPE_CHECKING:
    from threefold.planner.doctor import Examination
    from threefold.planner.hardware import Hardware


def command(
    as_json: bool = Option(False, "--json", help="Print one JSON object."),
    save: Path | None = Option(
        None, metavar="PATH.yaml", help="Write the hardware entry to this file instead of to the user's folder."
    ),
    quick: bool = Option(
        False, "--quick", help="Measure roughly, for a few seconds; the entry is saved only with --save."
    ),
    folder: Path = Option(Path(), metavar="DIR", help="Folder whose disk is measured, such as that of your runs."),
) -> None:
    """Examine this machine: hardware, versions, backends, network, limits, and the performance of local ranks.

    Measures matrix products, memory, collectives of 2, 4 and 8 local ranks, and the disk, in about half a minute.
    Saves the hardware entry `this-machine` for `threefold estimate` and the MFU of runs, and reports problems.

    Examples:
      threefold doctor
      threefold doctor --quick --save laptop.yaml
    """
    from threefold.launch import spawn
    from threefold.planner.doctor import examine, measured_entry
    from threefold.planner.hardware import THIS_MACHINE, save_hardware

    if save is not None:
        said, begins = f"--save is {shown(save)} but", b""
        if save.suffix.lower() not in (".yaml", ".yml"):
            raise UserError(f"{said} must end in .yaml; use {shown(save.with_suffix('.yaml'))}.")
        if not save.parent.is_dir() or save.is_dir():
            raise UserError(f"{said} no file can be written there; name one in a folder that exists.")
        if save.is_file():
            with suppress(OSError), save.open("rb") as file:
                begins = file.readline().strip()
            if begins != f"{THIS_MACHINE}:".encode():
                raise UserError(f"{said} doctor has not written that file; name one that does not exist yet.")
    if not folder.is_dir():
        raise UserError(f"--folder is {shown(folder)} but there is no such folder; name one that exists, such as `.`.")

    def run_ranks(worker: Callable[..., object], args: tuple[Any, ...], ranks: int, device: str) -> object:
        return spawn(worker, args, ranks, device="cuda" if device == "cuda" else "cpu", timeout=60.0)

    with Steps("Measuring", shown=not as_json) as steps:
        found = examine(run_ranks, folder, quick, steps.tell)
    entry = measured_entry(found)
    saved = None if entry is None or (quick and save is None) else save_hardware(entry, save)
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "saved": None if saved is None else str(saved)}))
    else:
        _print_examination(found, entry, saved)
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(1)


_PAIRS = {"pairs": "all_reduce, pairs", "send": "send of cp's ring, pairs", "stages": "send of pp's stages, pairs"}


def _print_examination(found: "Examination", entry: "Hardware | None", saved: Path | None) -> None:
    """Print tables of the examination, and a line for each finding."""
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
    routes = [(route.axis, route.here, route.hosts) for route in found.routes]
    print_table(("axis", "ranks of this host", "ranks of other hosts"), routes)
    if found.rates:
        _print_rates(found)
    for finding in found.findings:
        typer.echo(f"{finding.severity.capitalize()}: {finding}")
    if not found.findings:
        typer.echo("Nothing is wrong.")
    if entry is not None and saved is not None:
        name = entry.name if saved.stem == entry.name else str(saved)
        typer.echo(f"\nSaved the hardware entry {saved}; use it with: threefold estimate CONFIG --hardware {name}")


def _print_rates(found: "Examination") -> None:
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
    sent = [
        (
            *(str(rates.ranks), _PAIRS.get(name, name), each.transport),
            *(f"{1e6 * each.latency:,.0f}", _three_digits(each.bandwidth / 1e9)),
        )
        for rates in found.rates
        for name, each in rates.collectives.items()
    ]
    if sent:
        print_table(("ranks", "collective", "over", "latency, µs", "GB/s"), sent)
        nbytes = format_bytes(found.rates[-1].collectives["all_reduce"].nbytes)
        typer.echo(f"Of {nbytes} on all ranks at the same time; pairs: of groups of two ranks.\n")


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
