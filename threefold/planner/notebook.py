"""Layouts and schedules inside a notebook: the page of `threefold show`, and the timeline of `threefold simulate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from threefold.config import Config, load_config
from threefold.config.resolve import check_settings
from threefold.data.dataset import resolve_without_data
from threefold.planner.commands.show import layout_page
from threefold.planner.commands.simulate import named
from threefold.planner.hardware import find_hardware
from threefold.planner.layout_document import layout_document
from threefold.planner.schedule import Simulation, find_planned, simulated


@dataclass(frozen=True)
class LayoutPage:
    """Page about a layout, which a notebook shows as the last value of a cell.

    Attributes:
        document: the content of the page, as `threefold show --json` prints it.
        height: height in the notebook, in pixels.
    """

    document: dict[str, Any]
    height: int = 720

    @cached_property
    def html(self) -> str:
        """The page, which needs nothing else."""
        return layout_page(self.document)

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {self.height}px; border: 0"
        return f'<iframe style="{style}" srcdoc="{escape(self.html)}"></iframe>'


@dataclass(frozen=True)
class SimulatedStep:
    """Simulated step of a pipeline, whose timeline a notebook draws as the last value of a cell.

    Attributes:
        simulation: the timeline, with each action's start and end.
    """

    simulation: Simulation

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Bubble, times and activations of each stage, as `threefold simulate --json` prints them."""
        return self.simulation.facts()

    def _repr_svg_(self) -> str:
        from threefold.planner.pictures import about_step, draw_timeline, spans_of

        found, timeline = self.simulation, self.simulation.timeline
        rows = "stage" if timeline.program.stages == found.pp else "rank"
        about = about_step(timeline.length / 1000, timeline.bubble, rows)
        with TemporaryDirectory() as folder:
            picture = Path(folder) / "step.svg"
            draw_timeline(picture, spans_of(timeline), named(found), about, called=rows)
            return picture.read_text(encoding="utf-8")


def show(
    config: Config | str | Path, *, hardware: str | None = None, traffic: bool = True, height: int = 720
) -> LayoutPage:
    """Return the page of a config's layout: ranks, shards of each weight, pipeline schedule, memory and collectives.

    Args:
        config: a config, or the path of its file; the data need not exist.
        hardware: name or file of the hardware, for times and limits of memory; None for times in proportion.
        traffic: dry-run each stage to count its collectives, which takes seconds.
        height: height in the notebook, in pixels.
    """
    given = config if isinstance(config, Config) else load_config(Path(config))
    check_settings(given)
    entry = None if hardware is None else find_hardware(hardware)
    document = layout_document(resolve_without_data(given), entry, traffic=traffic)
    return LayoutPage({**document, "compare": None, "proof": None}, height)


Times = float | Sequence[float]


def simulate(
    schedule: str = "1f1b",
    stages: int = 4,
    micro_batches: int = 8,
    *,
    forward: Times = 1.0,
    backward_input: Times | None = None,
    backward_weight: Times | None = None,
    transfer: Times = 0.0,
    chunks: int | None = None,
) -> SimulatedStep:
    """Simulate a step under a pipeline schedule.

    Args:
        schedule: a name, such as `zbv`, or a file of actions, as in `parallel.schedule`.
        stages: number of pipeline ranks.
        micro_batches: micro-batches of the step.
        forward, backward_input, backward_weight: times of a micro-batch's passes through a rank in ms, one for all or
            one for each rank or stage; the last two are by default as `forward`.
        transfer: time of a transfer to the next stage.
        chunks: stages of each rank; None for those of the schedule.
    """
    row = find_planned(schedule)
    per_rank = row.stages_per_rank or (row.default_stages_per_rank if chunks is None else chunks)
    passes = [forward, *(forward if each is None else each for each in (backward_input, backward_weight))]
    times = [[each] if isinstance(each, int | float) else [*each] for each in (*passes, transfer)]
    return SimulatedStep(simulated(row, stages, per_rank, micro_batches, times[:3], times[3]))
