"""Times of training steps: predictions beside published ones, for each published table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.planner.goals import Goal
from benchmarks.planner.rows import Row, published_rows
from threefold.config import Config
from threefold.planner.estimate import step_time
from threefold.planner.hardware import Hardware, find_hardware
from threefold.planner.systems import System, find_system

LARGEST_MEDIAN, LARGEST_GIVEN, LARGEST_BY_DEFAULT = 0.05, 0.15, 0.08


@dataclass(frozen=True)
class Predicted:
    """Published step and its prediction.

    Attributes:
        seconds: predicted for the system that ran it.
        by_default: predicted for the usual system of the hardware.
    """

    row: Row
    seconds: float
    by_default: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.seconds / _published(self.row) - 1

    @property
    def default_error(self) -> float:
        return self.by_default / _published(self.row) - 1


def _published(row: Row) -> float:
    assert row.seconds is not None
    return row.seconds


def usual_system(config: Config, hardware: Hardware) -> System:
    """Return the training system that published runs of this kind use on such hardware."""
    sharded = hardware.sharded_system if config.parallel.zero > 1 else ""
    gpt = hardware.gpt_system if config.model.architecture == "gpt" else ""
    return find_system(sharded or gpt or hardware.system)


def predictions() -> list[Predicted]:
    """Predict every row that did not run out of memory."""
    found = []
    for row in published_rows():
        if row.seconds is not None:
            config, hardware = row.config(), find_hardware(row.hardware)
            times = [
                step_time(config, hardware, system).seconds
                for system in (find_system(row.system), usual_system(config, hardware))
            ]
            found.append(Predicted(row, *times))
    return found


def run(console: Console) -> list[Goal]:
    found = predictions()
    given = [each for each in found if each.row.given]
    table = Table("step", "layout", "hardware", "published", "predicted", "error", title="Steps given in full")
    for each in given:
        table.add_row(
            each.row.title,
            each.row.layout,
            each.row.hardware,
            f"{each.row.seconds:.3f} s",
            f"{each.seconds:.3f} s",
            f"{each.error:+.1%}",
        )
    console.print(table)
    console.print(_tables(found))
    errors, of_given = [abs(each.error) for each in found], [abs(each.error) for each in given]
    default = [abs(each.default_error) for each in found]
    return [
        Goal(f"median error of {len(given)} steps given in full", median(of_given), LARGEST_MEDIAN, unit="%"),
        Goal("largest of their errors", max(of_given), LARGEST_GIVEN, unit="%"),
        Goal(f"median error of all {len(found)} steps", median(errors), LARGEST_MEDIAN, unit="%"),
        Goal("the same, with the usual system of the hardware", median(default), LARGEST_BY_DEFAULT, unit="%"),
    ]


def _tables(found: Sequence[Predicted]) -> Table:
    table = Table(
        "published table", "hardware", "steps", "median", "mean", "largest", "usual system", title="All tables"
    )
    titles = dict.fromkeys((each.row.file, each.row.title, each.row.hardware) for each in found)
    for title in titles:
        rows = [each for each in found if (each.row.file, each.row.title, each.row.hardware) == title]
        errors = [each.error for each in rows]
        table.add_row(
            title[1],
            title[2],
            str(len(rows)),
            f"{median(map(abs, errors)):.1%}",
            f"{sum(errors) / len(errors):+.1%}",
            f"{max(errors, key=abs):+.1%}",
            f"{median(abs(each.default_error) for each in rows):.1%}",
        )
    return table
