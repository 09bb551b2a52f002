"""`threefold estimate`: time, throughput and memory of a training step, on hardware that need not be present."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from threefold.errors import UserError
from threefold.files import format_bytes
from threefold.report.figures import require_picture
from threefold.terminal import ConfigFile, Overrides, TrustCode, print_table, read_without_data

if TYPE_CHECKING:
    from threefold.planner.estimate import Estimate
    from threefold.planner.hardware import Hardware


HardwareName = Annotated[
    str | None,
    Option(
        "--hardware",
        metavar="NAME|FILE",
        help="a100-80, h100, …, this-machine (after threefold doctor), or a YAML file of your own.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON: seconds, bytes, tokens per second.")]


def chosen_hardware(name: str | None) -> "Hardware":
    """Return the entry that `--hardware` names; raise a `UserError` if it is missing or unknown."""
    from threefold.planner.hardware import find_hardware, hardware_names

    if name is None:
        raise UserError(f"--hardware is missing; give the path of a YAML file or one of {', '.join(hardware_names())}.")
    return find_hardware(name)


def command(
    config: ConfigFile,
    hardware: HardwareName = None,
    system: str | None = Option(
        None,
        metavar="NAME",
        help="System whose kernels and overlap are assumed: own, or a published one such as megatron-core or nemo.",
        show_default="own, as train runs it",
    ),
    as_json: AsJson = False,
    png: Path | None = Option(None, metavar="FILE", help="Draw the memory of each stage by cause (.png or .svg)."),
    trust_code: TrustCode = False,
    overrides: Overrides = None,
) -> None:
    """Estimate a training step of CONFIG: its time by cause, tokens per second, MFU and each stage's memory.

    Examples:
      threefold estimate run.yaml --hardware h100 --png memory.png
    """
    from threefold.planner.estimate import estimate as estimated
    from threefold.planner.systems import find_system

    entry = chosen_hardware(hardware)
    chosen = find_system(system) if system is not None else None
    resolved = read_without_data(config, overrides, trust_code=trust_code)
    if png is not None:
        require_picture(png)
    found = estimated(resolved, entry, chosen)
    if png is not None:
        from threefold.comm.layout import Layout
        from threefold.planner.pictures import draw_memory

        layout = Layout.from_config(resolved.parallel)
        title = f"{resolved.model.title} in {layout} on {found.ranks:,} × {entry.title}: memory"
        draw_memory(png, [stage.causes for stage in found.stages], found.usable_bytes, title, f"{_fit(found)}.")
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        _print_estimate(found, None if system is None else estimated(resolved, entry))


_SMALLEST = 0.005
"""Smallest fraction of a step that is shown as a cause of its own."""
_LARGE = 2 * 10**9
"""Bytes of a rank from which memory is shown in GB."""


def _print_estimate(found: "Estimate", built_in: "Estimate | None") -> None:
    """Print an estimate and, for another system, a line with the result of this package's own kernels.

    The memory is that of all pp ranks if they are few, else of the first two, the middle, the last and the largest.
    """
    from threefold.comm.layout import Layout
    from threefold.planner.pictures import OF_ACTIVATIONS

    config, hardware, whole, causes = found.config, found.hardware, found.step_seconds, found.time.causes
    typer.echo(f"{Layout.from_config(config.parallel)}, {found.ranks:,} × {hardware.title}, {config.precision.dtype}.")
    low, high = found.error_band
    recomputed = f", with recompute {found.hfu:.1%}" if config.train.recompute != "none" else ""
    typer.echo(
        f"Step: {_seconds(whole)} ({_seconds(low)} to {_seconds(high)}), {found.tokens_per_second:,.0f} tokens/s, "
        f"{found.tokens_per_second / found.ranks:,.0f} per rank; MFU {found.mfu:.1%}{recomputed}."
    )
    typer.echo(f"As with {found.system.name}: {found.system.about}.")
    shown = {name: each for name, each in causes.items() if each >= _SMALLEST * whole}
    shown["other"] = whole - sum(shown.values())
    rows = [(name, _seconds(each), f"{each / whole:.1%}") for name, each in shown.items()]
    print_table(("time of a step", "seconds", "share"), rows)
    peaks = found.peak_bytes
    unit, scale = ("GB", 1e9) if max(peaks) >= _LARGE else ("MB", 1e6)
    places = list(range(len(peaks)))
    if len(places) > 8:
        places = sorted({0, 1, len(peaks) // 2, len(peaks) - 1, peaks.index(max(peaks))})
    stages = {str(rank): found.stages[rank] for rank in places}

    def print_sizes(header: Iterable[str], sizes: Mapping[str, Iterable[int]]) -> None:
        print_table([*header], [(rank, *(f"{size / scale:.1f}" for size in each)) for rank, each in sizes.items()])

    by_cause = {rank: (*stage.by_dry_run.values(), stage.peak) for rank, stage in stages.items()}
    print_sizes(("rank", *found.stages[0].by_dry_run, "peak"), by_cause)
    parts = [name for name in OF_ACTIVATIONS if any(stage.causes.get(name) for stage in found.stages)]
    activations = {rank: [stage.causes[name] for name in parts] for rank, stage in stages.items()}
    print_sizes(("of the activations", *(OF_ACTIVATIONS[name] for name in parts)), activations)
    working = "working: temporary tensors; " if "working" in parts else ""
    typer.echo(f"{unit} of each pp rank; {working}fragmentation: memory that the allocator loses.")
    typer.echo(f"{_fit(found)}.")
    if built_in is not None and built_in.system != found.system:
        typer.echo(
            f"With this package's own kernels: {_seconds(built_in.step_seconds)} a step, MFU {built_in.mfu:.1%}; "
            "without --system it is shown by cause."
        )


def _fit(found: "Estimate") -> str:
    left, room = found.usable_bytes - max(found.needed_bytes), format_bytes(found.usable_bytes)
    if found.fits:
        return f"Fits: {format_bytes(left)} of {room} are left"
    return f"Does not fit: {format_bytes(-left)} more than the {room} of {found.hardware.name}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
