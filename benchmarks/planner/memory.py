"""Peak memory: predictions beside dry runs of this package's code, and beside published peaks."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.planner.goals import Goal
from benchmarks.planner.memory_layouts import CASES, LayoutCase
from benchmarks.planner.rows import published_rows
from threefold.config import resolve
from threefold.config.loading import config_of
from threefold.host import usable_cores
from threefold.planner.dry_run import dry_run, stage_ranks
from threefold.planner.estimate import usable_memory
from threefold.planner.hardware import find_hardware
from threefold.planner.stage_memory import stage_memory

LARGEST_OF_DRY_RUNS, LARGEST_OF_PUBLISHED, MOST_MISJUDGED = 0.03, 0.05, 0.1
_PUBLISHED = Path(__file__).parent / "published" / "memory.yaml"
_UNITS = {"GB": 1e9, "GiB": 2**30}


class Peak(NamedTuple):
    """Peak of memory.

    Attributes:
        title, layout: run that has it.
        known, predicted: bytes; `known` is published or from a dry run.
    """

    title: str
    layout: str
    known: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.known - 1


def of_dry_runs(console: Console, cases: Sequence[LayoutCase] = CASES) -> list[Peak]:
    """Return the peaks of the first and the last stage of each layout, using all cores."""
    context = get_context("forkserver")
    with ProcessPoolExecutor(usable_cores(), context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = track(pool.map(_of_dry_run, cases), "dry runs", len(cases), console=console)
        return [peak for peaks in found for peak in peaks]


def _of_dry_run(case: LayoutCase) -> list[Peak]:
    config = case.config
    predicted, ranks = stage_memory(config, "cpu"), stage_ranks(config)
    return [
        Peak(
            case.name,
            f"stage {place}: {case.layout}",
            dry_run(config, ranks[place]).peak_bytes,
            predicted[place].tensors,
        )
        for place in dict.fromkeys((0, len(predicted) - 1))
    ]


def published() -> Iterator[Peak]:
    """Yield every row of `published/memory.yaml`."""
    for table in yaml.safe_load(_PUBLISHED.read_text()):
        for parallel, known in table["rows"]:
            settings = table["settings"]
            sections = {
                **settings,
                "model": table["model"],
                "train": table["train"],
                "data": {"path": "unused", **settings["data"]},
                "parallel": {**settings.get("parallel", {}), **parallel},
            }
            config = resolve(config_of(sections), table["model"]["vocab_size"])
            predicted = max(stage.peak for stage in stage_memory(config, "cuda", table["system"]))
            layout = ", ".join(f"{name} {value}" for name, value in parallel.items() if name != "partition")
            yield Peak(table["title"], layout, known * _UNITS[table["unit"]], predicted)


def judged() -> tuple[int, int, int, int]:
    """Count published steps that ran, those judged not to fit, steps out of memory, and those judged to fit."""
    counts = {True: [0, 0], False: [0, 0]}
    for row in published_rows():
        memory = max(stage.needed for stage in stage_memory(row.config(), "cuda", row.system))
        fits, ran = memory <= usable_memory(find_hardware(row.hardware)), row.seconds is not None
        counts[ran][0] += 1
        counts[ran][1] += fits != ran
    return counts[True][0], counts[True][1], counts[False][0], counts[False][1]


def run(console: Console) -> list[Goal]:
    runs, papers = of_dry_runs(console), list(published())
    for title, peaks in (("Against dry runs on a CPU", runs), ("Against published peaks", papers)):
        table = Table("model", "layout", "known", "predicted", "error", title=title)
        for peak in peaks:
            row = f"{peak.known / 2**30:.2f} GiB", f"{peak.predicted / 2**30:.2f} GiB", f"{peak.error:+.1%}"
            table.add_row(peak.title, peak.layout, *row)
        console.print(table)
    ran, refused, failed, missed = judged()
    console.print(
        f"Of {ran} published steps {refused} are judged not to fit; of {failed} that did not, {missed} to fit."
    )
    errors = [abs(peak.error) for peak in runs]
    of_papers = [abs(peak.error) for peak in papers]
    return [
        Goal(f"largest error over {len(CASES)} layouts against dry runs", max(errors), LARGEST_OF_DRY_RUNS, unit="%"),
        Goal("median of these", median(errors), LARGEST_OF_DRY_RUNS, unit="%"),
        Goal(f"median error of {len(papers)} published peaks", median(of_papers), LARGEST_OF_PUBLISHED, unit="%"),
        Goal("largest of these", max(of_papers), LARGEST_OF_PUBLISHED, unit="%"),
        Goal("steps misjudged to fit or not", (refused + missed) / (ran + failed), MOST_MISJUDGED, unit="%"),
    ]
