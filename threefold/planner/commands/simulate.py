"""`threefold simulate`: the timeline and the bubble of a pipeline schedule."""

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from typer import Option

from threefold.errors import UserError
from threefold.files import counted, shown
from threefold.report.figures import require_picture
from threefold.report.options import whole_number
from threefold.terminal import print_table, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threefold.config.schedules import Action
    from threefold.planner.schedule import Simulation


_LONGEST: Final = 10**9
"""Limit in ms for the time of a pass: 11 days."""
_TIME = "per stage and micro-batch, in ms, or the times of all stages, separated by commas."


def command(
    schedule: str = Option(
        "1f1b",
        metavar="NAME",
        help="1f1b, interleaved, zbv, … or FILE.csv, as in parallel.schedule; also zb-h1 and zb-h2.",
    ),
    stages: str | None = Option(None, metavar="N", help="Number of pipeline ranks, as in parallel.pp."),
    micro_batches: str | None = Option(None, "--microbatches", metavar="M", help="Micro-batches per step."),
    forward: str = Option("1", metavar="MS", help=f"Time of a forward pass {_TIME}"),
    backward_input: str | None = Option(
        None, metavar="MS", help="Time of a backward pass for the input, in the same form.", show_default="as --forward"
    ),
    backward_weight: str | None = Option(
        None,
        metavar="MS",
        help="Time of a backward pass for the weights, in the same form.",
        show_default="as --forward",
    ),
    transfer: str = Option(
        "0", metavar="MS", help="Time of a transfer to the next stage, which it delays; it occupies neither stage."
    ),
    chunks: str | None = Option(
        None, metavar="V", help="Stages per rank, which share its times.", show_default="those of the schedule"
    ),
    as_json: bool = Option(False, "--json", help="Print one JSON object."),
    picture: Path | None = Option(None, "--png", metavar="FILE", help="Draw the timeline, as .png or .svg."),
    csv: Path | None = Option(None, metavar="FILE", help="Write the actions, for parallel.schedule: FILE.csv."),
) -> None:
    """Simulate a step under a pipeline schedule: its bubble, its time and the activations that each stage holds.

    The actions are those of a run. The bubble is (cost − m(F + B + W)) / cost,
    where cost is the longest time of a stage from its first action to its last.

    Examples:
      threefold simulate --schedule zbv --stages 4 --microbatches 12 --png a.png
    """
    from threefold.planner.schedule import find_planned, simulated

    if csv is not None:
        _check_path(csv)
    if picture is not None:
        require_picture(picture)
    row = find_planned(schedule)
    pp = _count(stages, "--stages", row.ranks)
    count = _count(micro_batches, "--microbatches", row.micro_batches)
    fixed = row.stages_per_rank
    per_rank = row.default_stages_per_rank if chunks is None else whole_number(chunks, "--chunks")
    if fixed is not None and fixed != per_rank:
        raise UserError(
            f"--chunks is {per_rank} but the schedule {row.name} has {counted(fixed, 'stage')} on each rank; use "
            f"{fixed}, or --schedule interleaved."
        )
    passes = [
        _times(forward, "--forward"),
        _times(forward if backward_input is None else backward_input, "--backward-input"),
        _times(forward if backward_weight is None else backward_weight, "--backward-weight"),
    ]
    found = simulated(row, pp, per_rank, count, passes, _times(transfer, "--transfer"))
    if picture is not None:
        from threefold.planner.pictures import about_step, draw_timeline, spans_of

        rows, timeline = "stage" if len(row.stage_ranks(pp, per_rank)) == pp else "rank", found.timeline
        about = about_step(timeline.length / 1000, timeline.bubble, rows)
        draw_timeline(picture, spans_of(timeline), named(found), about, called=rows)
    if csv is not None:
        write_schedule(csv, found.timeline.program.orders)
    if as_json:
        typer.echo(json.dumps(found.facts()))
    else:
        _print_simulation(found)


def _times(text: str, option: str) -> list[float]:
    """Parse an option as times in ms, separated by commas; raise a `UserError` for an invalid one."""
    found = []
    for part in text.split(","):
        try:
            time = float(part)
        except ValueError:
            rule = "must be a time in ms, or several between commas, such as 18.5 or 18.5,20,18.5"
            raise UserError(f"{option} {shown(text)} {rule}.") from None
        if not isfinite(time) or time < 0:
            raise UserError(f"{option} {part.strip()} must be a time of 0 ms or more; use 0.")
        if time > _LONGEST:
            raise UserError(f"{option} {part.strip()} must be a time of at most {_LONGEST:,} ms; use {_LONGEST}.")
        found.append(time)
    return found


def _count(text: str | None, option: str, of_file: int | None) -> int:
    """Return the number that an option gives, or that a schedule file fixes."""
    if text is not None:
        return whole_number(text, option)
    if of_file is None:
        raise UserError(f"{option} is missing, which the schedule needs; give it, such as {option} 8.")
    return of_file


def _print_simulation(found: "Simulation") -> None:
    timeline, facts, longest = found.timeline, found.facts(), found.timeline.longest
    typer.echo(f"{named(found)}.")
    called = "rank" if timeline.program.stages > found.pp else "stage"
    held = {"peak_microbatches": "held"}
    if found.schedule.defers_weight_gradients:
        held = {"peak_before_backward": "held for B", "peak_deferred": "for W", **held}
    header = (called, "start, ms", "end, ms", "works, ms", "waits, ms", "bubble", *held.values())
    rows: list[tuple[str, ...]] = []
    for rank, busy in enumerate(timeline.busy):
        times = (facts["start"][rank], facts["end"][rank], busy, longest - busy)
        counts = (f"{facts[key][rank]:.4g}" for key in held)
        # A bubble is a fraction of the longest rank's time, so that the mean is the total bubble.
        rows.append((str(rank), *(f"{time:,.1f}" for time in times), f"{1 - busy / longest:.1%}", *counts))
    print_table(header, shortened(rows))
    most = max(found.peaks)
    typer.echo(
        f"Bubble {timeline.bubble:.1%}: time waited within the {longest:,.1f} ms from the first to the last action of "
        f"the longest {called}.\nThe step takes {timeline.length:,.1f} ms, in {1 - timeline.idle:.1%} of which a "
        f"{called} is busy on average; {called} {found.peaks.index(most)} holds the most: {most:.4g} of "
        f"{counted(found.micro_batches, 'micro-batch', 'es')}."
    )


def named(found: "Simulation") -> str:
    """Return the title of a simulation's picture."""
    stages = found.timeline.program.stages
    of_ranks = f" on {counted(found.pp, 'rank')}" if stages > found.pp else ""
    micro_batches = counted(found.micro_batches, "micro-batch", "es")
    return f"{found.schedule.name}: {counted(stages, 'stage')}{of_ranks}, {micro_batches}"


def write_schedule(path: Path, orders: "Sequence[Sequence[Action]]") -> None:
    """Write actions as a CSV file; raise a `UserError` if it cannot be written or exists with other actions."""
    from threefold.planner.custom_schedule import LARGEST_FILE

    text, what = "".join(",".join(map(str, order)) + "\n" for order in orders), f"The pipeline schedule {shown(path)}"
    _check_path(path)
    if len(text) > LARGEST_FILE:
        rule = f"would have {len(text):,} bytes and is read up to {LARGEST_FILE:,}; use fewer micro-batches"
        raise UserError(f"{what} {rule}.")
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise UserError(f"{what} exists already and has other actions; remove it first.")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror or error}.") from None


def _check_path(path: Path) -> None:
    """Check that a schedule can be written to a path, before computing it; raise a `UserError` if not."""
    what = f"The pipeline schedule {shown(path)}"
    if path.suffix.lower() != ".csv":
        use = shown(path.with_suffix(".csv"))
        raise UserError(f"{what} must end in .csv, as parallel.schedule names it; use {use}.")
    if not path.parent.is_dir():
        raise UserError(f"{what} cannot be written: there is no folder {shown(path.parent)}.")
