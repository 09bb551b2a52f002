"""`threefold plan`: search the layouts of a number of GPUs, and write the best one as a config."""

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from threefold.cli.estimate import AsJson, HardwareName
from threefold.cli.options import ConfigFile, Overrides, TrustCode, read_config
from threefold.errors import UserError


def plan(
    config: ConfigFile,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="N", help="Devices that there are.", show_default=False)
    ] = None,
    hardware: HardwareName = None,
    objective: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What is best: throughput on all N, or on N or fewer the cost per token, or the latency of a step.",
        ),
    ] = "throughput",
    tokens: Annotated[
        str | None,
        typer.Option(metavar="T", help="Tokens to train on, such as 300B.", show_default="those of train.max_steps"),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", metavar="SECTION.KEY=VALUE", help="A setting that every layout has; may be repeated."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Whose kernels and memory, as for estimate.", show_default="own, as train runs it"
        ),
    ] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the config of the first here.")] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw memory against throughput.")] = None,
    as_json: AsJson = False,
    trust_code: TrustCode = False,
    overrides: Overrides = None,
) -> None:
    """Find the best layout for training CONFIG on N GPUs of a type, without any of them.

    Considers all valid dp, tp, pp, cp, ep, ZeRO, schedule, chunks, micro-batch, recompute and sequence parallelism.
    The global batch stays the same, and so do the losses.
    """
    began = perf_counter()
    from threefold.cli.options import whole_number
    from threefold.config.section import MOST_RANKS
    from threefold.planner.hardware import find_hardware, hardware_names
    from threefold.planner.search.planning import (
        config_text,
        plan_layouts,
        read_request,
        require_no_layout,
        require_writable,
        write_config,
    )

    if gpus is None:
        raise UserError("--gpus is missing; say how many there are, such as --gpus 8.")
    if hardware is None:
        raise UserError(f"--hardware is missing; give the path of a YAML file or one of {', '.join(hardware_names())}.")
    count, entry = whole_number(gpus, "--gpus", most=MOST_RANKS), find_hardware(hardware)
    if write is not None:
        require_writable(write)
    if png is not None:
        from threefold.planner.timeline import check_picture

        check_picture(png)
    require_no_layout(overrides or ())
    given = read_config(config, overrides, trust_code=trust_code)
    request = read_request(given, count, entry, objective, fix or (), tokens, system)
    planned = plan_layouts(request, lambda: perf_counter() - began)
    from threefold.cli.plan_view import json_document, predictions, print_plan

    if write is not None:
        asked = f"{config} --gpus {gpus} --hardware {hardware}" + (f" --tokens {tokens}" if tokens else "")
        budget = None if tokens is None else planned.budget(planned.best)
        steps = None if budget is None else budget.steps
        write_config(write, config_text(given, planned.best.choice, asked, predictions(planned), steps))
    if png is not None:
        from threefold.planner.pictures import draw_layouts

        draw_layouts(planned, png)
    if as_json:
        typer.echo(json_document(planned))
    else:
        print_plan(planned, write, png)
