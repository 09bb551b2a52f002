"""`threefold simulate`: the timeline and the bubble of a pipeline schedule."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from threefold.cli.terminal import check_picture_file, counted, print_table, times, whole_number
from threefold.errors import UserError

if TYPE_CHECKING:
    from threefold.config.schedules import Schedule
    from threefold.planner.schedule import Simulation


_TIME = "per stage and micro-batch, in ms; several between commas are those of each stage."


def command(
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="1f1b, interleaved, zbv … or FILE.csv, as parallel.schedule; or zb-h1, zb-h2."
        ),
    ] = "1f1b",
    stages: Annotated[str | None, typer.Option(metavar="N", help="Pipeline stages (ranks, as parallel.pp).")] = None,
    micro_batches: Annotated[
        str | None, typer.Option("--microbatches", metavar="M", help="Micro-batches of a step.")
    ] = None,
    forward: Annotated[str, typer.Option(metavar="MS", help=f"Forward pass {_TIME}")] = "1",
    backward_input: Annotated[
        str | None,
        typer.Option(metavar="MS", help="Backward pass for the input, likewise.", show_default="as --forward"),
    ] = None,
    backward_weight: Annotated[
        str | None,
        typer.Option(metavar="MS", help="Backward pass for the weights, likewise.", show_default="as --forward"),
    ] = None,
    transfer: Annotated[
        str, typer.Option(metavar="MS", help="From a stage to the next; it delays that one and occupies neither.")
    ] = "0",
    chunks: Annotated[
        str | None,
        typer.Option(
            metavar="V", help="Stages of each rank, which share its times.", show_default="as the schedule has them"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    picture: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the timeline, as .png or .svg.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the actions, for parallel.schedule: FILE.csv.")
    ] = None,
) -> None:
    """Simulate a step under a pipeline schedule: its bubble, its time and what each stage holds.

    The actions are the same as in a run. The bubble is (cost − m(F + B + W)) / cost,
    where cost is the longest time of a stage from its first action to its last.
    """
    from threefold.config.schedules import check_schedule_path, write_schedule_file
    from threefold.planner.schedule import find_planned, simulated

    if csv is not None:
        check_schedule_path(csv)
    check_picture_file(picture)
    row = find_planned(schedule)
    pp = _count(stages, "--stages", row.ranks)
    count = _count(micro_batches, "--microbatches", row.micro_batches)
    per_rank = row.default_stages_per_rank if chunks is None else _chunks(whole_number(chunks, "--chunks"), row)
    passes = [
        times(text, option)
        for text, option in (
            (forward, "--forward"),
            (forward if backward_input is None else backward_input, "--backward-input"),
            (forward if backward_weight is None else backward_weight, "--backward-weight"),
        )
    ]
    found = simulated(row, pp, per_rank, count, passes, times(transfer, "--transfer"))
    if picture is not None:
        from threefold.planner.pictures import draw_timeline, spans_of

        rows = "stage" if len(row.stage_ranks(pp, per_rank)) == pp else "rank"
        draw_timeline(picture, spans_of(found.timeline), _timeline_title(found), called=rows)
    if csv is not None:
        write_schedule_file(csv, found.timeline.program.orders)
    if as_json:
        typer.echo(json.dumps(found.facts()))
    else:
        _print_simulation(found)


def _chunks(number: int, schedule: "Schedule") -> int:
    fixed = schedule.stages_per_rank
    if fixed not in (None, number):
        stages = "1 stage" if fixed == 1 else f"{fixed} stages"
        raise UserError(
            f"--chunks is {number} but the schedule {schedule.name} has {stages} on each rank; use {fixed}, or "
            "--schedule interleaved."
        )
    return number


def _count(text: str | None, option: str, of_file: int | None) -> int:
    """Return the number of an option, or the one that a schedule file fixes."""
    if text is not None:
        return whole_number(text, option)
    if of_file is None:
        raise UserError(f"{option} is missing, which the schedule needs; give it, such as {option} 8.")
    return of_file


_MOST_ROWS: Final = 24


def _print_simulation(found: "Simulation") -> None:
    """Print what each rank does and holds, and a line about the bubble."""
    timeline, several = found.timeline, found.timeline.program.stages > found.pp
    typer.echo(f"{_named(found)}.")
    held = ("held for B", "for W", "held") if found.schedule.defers_weight_gradients else ("held",)
    header = ("rank" if several else "stage", "start, ms", "end, ms", "works, ms", "waits, ms", "bubble", *held)
    rows = _rows(found)
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], ("…",) * len(header), *rows[-half:]]
    print_table(header, rows)
    most = max(found.peaks)
    typer.echo(
        f"Bubble {timeline.bubble:.1%} of the {timeline.longest:,.1f} ms of the longest {header[0]}; the step takes "
        f"{timeline.length:,.1f} ms, and {header[0]} {found.peaks.index(most)} holds the most: {most:.4g} of "
        f"{counted(found.micro_batches, 'micro-batch', 'es')}."
    )


def _timeline_title(found: "Simulation") -> str:
    """Return the title of the timeline: the schedule, its bubble and the time of a step."""
    length = found.timeline.length
    time = f"{length:,.0f}" if length >= 1000 else f"{length:.4g}"
    return f"{_named(found)}: bubble {found.timeline.bubble:.1%}, step {time} ms"


def _named(found: "Simulation") -> str:
    stages = found.timeline.program.stages
    of_ranks = f" on {counted(found.pp, 'rank')}" if stages > found.pp else ""
    micro_batches = counted(found.micro_batches, "micro-batch", "es")
    return f"{found.schedule.name}: {counted(stages, 'stage')}{of_ranks}, {micro_batches}"


def _rows(found: "Simulation") -> list[tuple[str, ...]]:
    """Return a row per rank; bubbles are shares of the longest rank's time, so that their mean is the total bubble."""
    facts, longest = found.facts(), found.timeline.longest
    keys = ("peak_before_backward", "peak_deferred", "peak_microbatches")
    rows: list[tuple[str, ...]] = []
    for rank in range(found.pp):
        busy = facts["busy_time"][rank]
        times = (facts["start"][rank], facts["end"][rank], busy, longest - busy)
        held = [facts[key][rank] for key in (keys if found.schedule.defers_weight_gradients else keys[-1:])]
        cells = (*(f"{time:,.1f}" for time in times), f"{1 - busy / longest:.1%}", *(f"{count:.4g}" for count in held))
        rows.append((str(rank), *cells))
    return rows
