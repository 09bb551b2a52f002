"""`threefold dry-run`: the training step of a rank, without the cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

from threefold.cli.options import ConfigFile, ModelFile, Overrides, TrustCode, read_config, with_model
from threefold.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from threefold.config import Config


def dry_run(
    config: ConfigFile,
    model: ModelFile = None,
    trust_code: TrustCode = False,
    rank: Annotated[str | None, typer.Option(metavar="R", help="Rank to run.", show_default="0")] = None,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Run one rank of each pipeline stage.")] = False,
    world: Annotated[
        str | None,
        typer.Option(metavar="N", help="Ranks of the run, from which parallel.dp follows where CONFIG has none."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU type, to say whether the ranks fit into its memory.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of tables.")] = False,
    overrides: Overrides = None,
) -> None:
    """Run the training code of one rank of CONFIG's layout for a step, on tensors without memory and without GPUs.

    Prints the bytes of weights, gradients, optimizer state and activations, each kind of collective, and FLOPs.
    The data need not exist. Exit status: 0, or 2 if the rank could not run.
    """
    if rank is not None and all_stages:
        raise UserError(f"--rank is {rank} and --all-stages is given too; give one of them.")
    from threefold.cli.options import whole_number
    from threefold.config.section import MOST_RANKS

    number = 0 if rank is None else whole_number(rank, "--rank", least=0)
    ranks = None if world is None else whole_number(world, "--world", most=MOST_RANKS)
    resolved = _resolve(config, with_model(overrides, model), ranks, trust_code)
    from threefold.planner.hardware import find_hardware

    on = None if hardware is None else find_hardware(hardware)
    from threefold.comm.layout import Layout

    last = Layout.from_config(resolved.parallel).world_size - 1
    if number > last:
        raise UserError(
            f"--rank is {number} but the layout has ranks 0 to {last}; use {last}."
            if last
            else f"--rank is {number} but the layout has rank 0 alone; use 0."
        )
    from threefold.cli.dry_run_view import print_reports, reports_as_json
    from threefold.cli.options import Steps
    from threefold.planner.dry_run import run_ranks, run_stages

    with Steps("Running", shown=not json) as steps:
        reports = run_stages(resolved, steps.tell) if all_stages else run_ranks(resolved, [number], tell=steps.tell)
    if json:
        typer.echo(reports_as_json(resolved, reports, on))
    else:
        print_reports(resolved, reports, on)


def _resolve(file: "Path", overrides: list[str], world: int | None, trust_code: bool) -> "Config":
    from threefold.config.resolve import check_settings

    given = read_config(file, overrides, trust_code=trust_code)
    if world is not None:
        given = read_config(file, [*overrides, f"parallel.dp={_replicas(given, world)}"], trust_code=trust_code)
    check_settings(given)
    from threefold.data.dataset import resolve_without_data

    return resolve_without_data(given)


def _replicas(config: "Config", world: int) -> int:
    """Return `parallel.dp` for a world size; raise a `UserError` if the layout or a given dp does not fit."""
    parallel = config.parallel
    each = parallel.tp * parallel.pp * parallel.cp
    product = "tp · pp" if parallel.cp == 1 else "tp · pp · cp"
    if world % each:
        nearest = max(1, round(world / each)) * each
        raise UserError(f"--world is {world} but must be a multiple of {product} = {each}; use {nearest}.")
    replicas = world // each
    if "dp" in config.given().get("parallel", {}) and parallel.dp != replicas:
        raise UserError(
            f"--world is {world} but parallel.dp {parallel.dp} makes a layout of {each * parallel.dp} ranks; use "
            f"--world {each * parallel.dp}, or --set parallel.dp={replicas}."
        )
    return replicas
