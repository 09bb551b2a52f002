"""`threefold dry-run`: the training step of a rank, without the cluster."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from threefold import terminal
from threefold.errors import UserError
from threefold.files import counted, format_bytes
from threefold.report import progress
from threefold.report.options import whole_number

if TYPE_CHECKING:
    from threefold.config import Config
    from threefold.planner.dry_step import DryRunReport
    from threefold.planner.hardware import Hardware


def command(
    config: terminal.ConfigFile,
    model: terminal.ModelFile = None,
    trust_code: terminal.TrustCode = False,
    rank: str | None = Option(None, metavar="R", help="Rank to run.", show_default="0"),
    all_stages: bool = Option(False, "--all-stages", help="Run one rank of each pipeline stage."),
    world: str | None = Option(None, metavar="N", help="Ranks of the run, which set parallel.dp if CONFIG does not."),
    hardware: str | None = Option(None, metavar="NAME", help="GPU type, to check whether the ranks fit in its memory."),
    as_json: bool = Option(False, "--json", help="Print a JSON document instead of tables."),
    overrides: terminal.Overrides = None,
) -> None:
    """Run the training code of one rank of CONFIG's layout for a step, on tensors without memory and without GPUs.

    Prints the bytes of weights, gradients, optimizer state and activations, each kind of collective, and FLOPs.
    The data need not exist. Exit status: 0, or 2 if the rank could not run.

    Examples:
      threefold dry-run run.yaml --all-stages --hardware h100
    """
    if rank is not None and all_stages:
        raise UserError(f"--rank is {rank} and --all-stages is given too; give one of them.")
    from threefold.comm.layout import Layout
    from threefold.config.section import MOST_RANKS

    number = 0 if rank is None else whole_number(rank, "--rank", least=0)
    ranks = None if world is None else whole_number(world, "--world", most=MOST_RANKS)
    settings = terminal.with_model(overrides, model)
    if ranks is not None:
        given = terminal.read_config(config, settings, trust_code=trust_code)
        settings.append(f"parallel.dp={_replicas(given, ranks)}")
    resolved = terminal.read_without_data(config, settings, trust_code=trust_code)
    from threefold.planner.hardware import find_hardware

    on = None if hardware is None else find_hardware(hardware)
    terminal.require_ranks((number,), resolved, "--rank is")
    if on is not None and on.device == "cuda":
        from threefold.config.resolve import on_device

        resolved = on_device(resolved, "cuda")  # the default number of logits at once is that of the device
    from threefold.planner.dry_run import run_ranks, run_stages

    with progress.Steps("Running", lines=True, quiet=progress.QUIET) as steps:
        reports = run_stages(resolved, steps.tell) if all_stages else run_ranks(resolved, [number], tell=steps.tell)
    largest = max(reports, key=lambda report: report.peak_bytes)
    if as_json:
        layout = Layout.from_config(resolved.parallel)
        document: dict[str, Any] = {"layout": asdict(layout), "world_size": layout.world_size}
        document |= {"peak_bytes": largest.peak_bytes, "ranks": []}
        for report in reports:  # the peak is broken down only by the causes of an estimate
            values = {**asdict(report), "causes": {**report.causes, "fragmentation": 0}}
            del values["at_peak"], values["activation_bytes"]
            document["ranks"].append(values)
        if on is not None:
            document |= {"hardware": on.name, **_Room.of(resolved, on, reports).as_json()}
        typer.echo(json.dumps(document, indent=2))
        return
    _print_reports(resolved, reports)
    needs = f"Rank {largest.rank:,} needs {format_bytes(largest.peak_bytes)} at its peak"
    if on is None:
        typer.echo(f"{needs}; buffers inside kernels and of the communication library are not counted.")
    else:
        typer.echo(_Room.of(resolved, on, reports).sentence(needs, on))


@dataclass(frozen=True)
class _Room:
    """Memory that the largest of some ranks needs on hardware: with the kernels of a CPU, which the dry run executes,
    and with the hardware's, by the formulas of `threefold estimate`; None for a model that has none."""

    run_bytes: int
    estimated_bytes: int | None
    usable_bytes: int

    @classmethod
    def of(cls, config: "Config", on: "Hardware", reports: Sequence["DryRunReport"]) -> "_Room":
        from threefold.planner.block import UnknownBlock
        from threefold.planner.estimate import built_in_system, usable_memory
        from threefold.planner.stage_memory import stage_memory

        largest = max(report.peak_bytes for report in reports)
        if on.device == "cpu":
            return cls(largest, largest, usable_memory(on))
        estimated = None
        with suppress(UnknownBlock):
            stages = stage_memory(config, on.device, built_in_system(config, on).name)
            estimated = max(stages[report.coordinates["pp"]].needed for report in reports)
        return cls(largest, estimated, usable_memory(on))

    @property
    def fits(self) -> bool | None:
        """Whether the ranks fit; None if only one of the numbers does, or if one is unknown."""
        run_fits = self.run_bytes <= self.usable_bytes
        return run_fits if self.estimated_bytes is not None and run_fits == self._estimate_fits else None

    @property
    def _estimate_fits(self) -> bool:
        return self.estimated_bytes is not None and self.estimated_bytes <= self.usable_bytes

    def as_json(self) -> dict[str, Any]:
        return {"fits": self.fits, "estimated_bytes": self.estimated_bytes, "usable_bytes": self.usable_bytes}

    def sentence(self, needs: str, on: "Hardware") -> str:
        room = f"the {format_bytes(self.usable_bytes)} that tensors may have of {on.title}"
        if on.device == "cpu":
            return f"{needs}, which {'fits' if self.fits else 'does not fit'} into {room}."
        needs = f"{needs} with the kernels of a CPU"
        if self.estimated_bytes is None:
            return f"{needs}, of {room}; what a GPU's kernels keep of this model is not known."
        needs = f"{needs}, and {format_bytes(self.estimated_bytes)} with a GPU's by threefold estimate"
        if self.fits is not None:
            return f"{needs}; {'both fit' if self.fits else 'neither fits'} into {room}."
        return f"{needs}; only the {'second' if self._estimate_fits else 'first'} fits into {room}."


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


def _print_reports(config: "Config", reports: Sequence["DryRunReport"]) -> None:
    """Print memory, collectives and floating-point operations of each rank."""
    from threefold.config.by_step import entries_of
    from threefold.config.rules import executed_micro_batches

    train = config.train
    each = "{} of {}".format(*executed_micro_batches(config))
    print_layout(config)
    step = "One step" if len(entries_of(train.global_batch_size)) == 1 else "One of the largest steps"
    typer.echo(f"{step}: {train.global_batch_size:,} samples, in micro-batches of each replica: {each}.")
    work, memory = [], []
    for report in reports:
        place = (f"{report.rank:,}", str(report.coordinates["pp"]))
        layers = terminal.first_to_last(report.layers)
        work.append((*place, layers, f"{report.parameters:,}", f"{report.flops / 1e12:,.3f}"))
        memory.append((*place, *map(format_bytes, (*report.causes.values(), report.peak_bytes))))
    terminal.print_table(("rank", "stage", "layers", "parameters", "TFLOP"), work)
    terminal.print_table(("rank", "stage", "weights", "gradients", "optimizer", "activations", "peak"), memory)
    typer.echo(
        "At the peak, by the causes of threefold estimate, which adds the memory that an allocator loses "
        "(fragmentation)."
    )
    collectives: list[tuple[str, ...]] = []
    for of_rank, alike in groupby(reports, key=lambda report: list(report.collectives)):
        ranks = [report.rank for report in alike]  # neighbours with the same collectives share the rows
        named = f"{ranks[0]:,}" if len(ranks) == 1 else f"{ranks[0]:,} to {ranks[-1]:,}"
        for each_kind in of_rank:
            count, nbytes = f"{each_kind.count:,}", format_bytes(each_kind.nbytes)
            collectives.append((named, each_kind.axis, each_kind.operation, count, nbytes))
            named = ""
    if collectives:
        terminal.print_table(("ranks", "axis", "collective", "count", "bytes"), collectives)


def print_layout(config: "Config") -> None:
    """Print the layout of a config, its ranks and its dtype."""
    from threefold.comm.layout import Layout

    layout = Layout.from_config(config.parallel)
    zero = f", zero {config.parallel.zero}" if config.parallel.zero else ""
    typer.echo(f"Layout: {layout}{zero}, {counted(layout.world_size, 'rank')}; {config.precision.dtype}.")
