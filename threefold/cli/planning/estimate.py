"""`threefold estimate`: seconds, throughput and memory of a training step on hardware that need not be there."""

import json
from pathlib import Path
from typing import Annotated

import typer

from threefold.cli.options import ConfigFile, Overrides, TrustCode, read_config
from threefold.errors import UserError

HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="a100-80, h100, …, this-machine (after threefold doctor), or a YAML file of your own.",
    ),
]
SystemName = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="NAME",
        help="Whose kernels and overlap: own, or of a published system: megatron-core, nemo, …",
        show_default="own, as train runs it",
    ),
]
Picture = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", help="Draw the memory of each stage by cause (.png or .svg).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: seconds, bytes, tokens per second.")]


def estimate(
    config: ConfigFile,
    hardware: HardwareName = None,
    system: SystemName = None,
    as_json: AsJson = False,
    png: Picture = None,
    trust_code: TrustCode = False,
    overrides: Overrides = None,
) -> None:
    """Estimate a training step of CONFIG: its time by cause, tokens per second, MFU and each stage's memory."""
    from threefold.config.resolve import check_settings
    from threefold.plan.cost.estimate import estimate as estimated
    from threefold.plan.cost.system import find_system
    from threefold.plan.hardware.catalogue import find_hardware, hardware_names

    if hardware is None:
        raise UserError(f"--hardware is missing; give the path of a YAML file or one of {', '.join(hardware_names())}.")
    entry = find_hardware(hardware)
    chosen = find_system(system) if system is not None else None
    given = read_config(config, overrides, trust_code=trust_code)
    check_settings(given)
    from threefold.data.vocabulary import resolve_without_data

    resolved = resolve_without_data(given)
    if png is not None:
        from threefold.plan.pictures.style import check_picture

        check_picture(png)
    found = estimated(resolved, entry, chosen)
    if png is not None:
        from threefold.cli.planning.estimate_view import memory_title
        from threefold.plan.pictures.memory_bars import draw_memory

        draw_memory(png, [stage.causes for stage in found.stages], found.usable_bytes, memory_title(found))
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    from threefold.cli.planning.estimate_view import print_estimate

    print_estimate(found, None if system is None else estimated(resolved, entry))
