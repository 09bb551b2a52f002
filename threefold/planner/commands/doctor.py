"""`threefold doctor`: hardware and software of this machine, its measured speed, and problems found."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Option

from threefold.errors import UserError
from threefold.files import first_bytes, format_bytes, shown
from threefold.report.progress import Steps
from threefold.terminal import print_table

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
        said = f"--save is {shown(save)} but"
        if save.suffix.lower() not in (".yaml", ".yml"):
            raise UserError(f"{said} must end in .yaml; use {shown(save.with_suffix('.yaml'))}.")
        if not save.parent.is_dir() or save.is_dir():
            raise UserError(f"{said} no file can be written there; name one in a folder that exists.")
        if save.is_file() and first_bytes(save, 100).partition(b"\n")[0].strip() != f"{THIS_MACHINE}:".encode():
            raise UserError(f"{said} doctor has not written that file; name one that does not exist yet.")
    if not folder.is_dir():
        raise UserError(f"--folder is {shown(folder)} but there is no such folder; name one that exists, such as `.`.")

    with Steps("Measuring", shown=not as_json) as steps:
        found = examine(partial(spawn, timeout=60.0), folder, quick, steps.tell)
    entry = measured_entry(found)
    saved = None if entry is None or (quick and save is None) else save_hardware(entry, save)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "saved": None if saved is None else str(saved)}))
    else:
        _print_examination(found, entry, saved)
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(1)


def _print_examination(found: "Examination", entry: "Hardware | None", saved: Path | None) -> None:
    """Print tables of the examination, and a line for each finding."""
    machine, rates = found.machine, []
    rows = [
        ("processor", f"{machine.processor}, of {machine.machine_cores}"),
        ("memory", f"{format_bytes(machine.memory)}, {format_bytes(machine.shared_memory)} free in /dev/shm"),
        ("GPUs", f"{machine.gpus}"),
        ("system", f"{machine.system}, {machine.address or 'no address'}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
        ("backends", ", ".join(machine.backends) or "none"),
        ("C compiler", machine.compiler or "none"),
    ]
    if found.disk is not None:
        speed, free = format_bytes(int(found.disk.bandwidth)), format_bytes(found.disk.free)
        rows.append(("disk", f"{found.disk.folder}: {speed}/s written, {free} free"))
    print_table((machine.host, ""), rows)
    for each in found.rates:
        speeds = (*(max(each.matrix[dtype].values()) for dtype in ("fp32", "bf16")), each.memory_bandwidth)
        sums = (f"{1e6 * one.latency:,.0f} µs, {_giga(one.bandwidth)}" for one in each.collectives.values())
        rates.append((str(each.ranks), str(each.threads), *map(_giga, speeds), *sums))
    print_table(("ranks", "threads", "fp32, GFLOP/s", "bf16", "memory, GB/s", "all-reduce, GB/s", "of pairs"), rates)
    typer.echo("Of each rank while all do the same: the fastest product of square matrices, a copy, sums over ranks.\n")
    for finding in found.findings:
        text = finding.text[0].upper() + finding.text[1:]
        typer.echo(f"{finding.severity.capitalize()}: {text}: {finding.remedy}.")
    if not found.findings:
        typer.echo("Nothing is wrong.")
    if entry is not None and saved is not None:
        name = entry.name if saved.stem == entry.name else str(saved)
        typer.echo(f"\nSaved the hardware entry {saved}; use it with: threefold estimate CONFIG --hardware {name}")


def _giga(value: float) -> str:
    return f"{value / 1e9:,.0f}" if value >= 100e9 else f"{value / 1e9:.3g}"
