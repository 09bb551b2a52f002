"""What `threefold simulate` prints for people."""

from typing import TYPE_CHECKING, Final

import typer

from threefold.cli.data_view import print_table

if TYPE_CHECKING:
    from threefold.plan.schedule.simulation import Simulation

_MOST_ROWS: Final = 24


def print_simulation(found: "Simulation") -> None:
    """Print what each rank does and holds, and the bubble in one line."""
    timeline, several = found.timeline, found.timeline.program.stages > found.pp
    micro_batches = _number(found.micro_batches, "micro-batch", "es")
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
        f"{micro_batches}."
    )


def timeline_title(found: "Simulation") -> str:
    """The title of the picture: what is simulated, its bubble and the time of a step."""
    length = found.timeline.length
    time = f"{length:,.0f}" if length >= 1000 else f"{length:.4g}"
    return f"{_named(found)}: bubble {found.timeline.bubble:.1%}, step {time} ms"


def _named(found: "Simulation") -> str:
    """The schedule with its numbers of stages, ranks and micro-batches."""
    stages = found.timeline.program.stages
    of_ranks = f" on {_number(found.pp, 'rank')}" if stages > found.pp else ""
    return (
        f"{found.schedule.name}: {_number(stages, 'stage')}{of_ranks}, "
        f"{_number(found.micro_batches, 'micro-batch', 'es')}"
    )


def _rows(found: "Simulation") -> list[tuple[str, ...]]:
    """A row for each rank; bubbles are shares of the longest rank's time, so that their mean is that of all."""
    facts, longest, deferring = found.facts(), found.timeline.longest, found.schedule.defers_weight_gradients
    rows: list[tuple[str, ...]] = []
    for rank in range(found.pp):
        busy = facts["busy_time"][rank]
        times = (facts["start"][rank], facts["end"][rank], busy, longest - busy)
        held = [facts["peak_microbatches"][rank]]
        if deferring:
            held = [facts["peak_before_backward"][rank], facts["peak_deferred"][rank], *held]
        shown = (f"{1 - busy / longest:.1%}", *(f"{count:.4g}" for count in held))
        rows.append((str(rank), *(f"{time:,.1f}" for time in times), *shown))
    return rows


def _number(count: int, thing: str, plural: str = "s") -> str:
    return f"{count:,} {thing}{plural if count != 1 else ''}"
