"""Print how well the planner predicts, as tables beside published and measured numbers.

    python -m benchmarks.planner [SECTION ...]

Ends with a table of the goals, and exits with status 1 if one is missed. A section is a module of this package with a
function `run(console) -> list[Goal]` that prints its tables; it begins with a line of `SECTIONS`.
"""

import argparse
import sys
from importlib import import_module
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.planner.goals import Goal

SECTIONS: Final = {
    "memory": "peaks of memory, against dry runs and published ones",
    "search": "times of the search of layouts",
    "schedules": "bubbles of pipeline schedules, against published ones",
    "steps": "times of training steps, against published ones",
}
"""Content of the tables, by module of this package."""
NAMED: Final = {"this_machine": "steps of eight local ranks, measured here"}
"""Sections that run only when named, as they need an idle machine."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**SECTIONS, **NAMED}
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(known)}; default: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--this-machine", action="store_true", help="the section this_machine too")
    parser.add_argument("--width", type=int, help="columns of the output; default: those of the terminal, at least 120")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in known]
    if unknown:
        parser.error(f"there is no section {unknown[0]}; there are {', '.join(known)}")
    console = Console(width=arguments.width or max(120, Console().width), highlight=False)
    goals: list[tuple[str, Goal]] = []
    wanted = arguments.sections or list(() if arguments.this_machine else SECTIONS)
    for name in [*wanted, *(["this_machine"] if arguments.this_machine else [])]:
        console.rule(f"{name}: {known[name]}")
        goals += [(name, goal) for goal in import_module(f"benchmarks.planner.{name}").run(console)]
    table = Table("section", "what", "found", "goal", "met", title="Goals")
    for name, goal in goals:
        table.add_row(name, *goal.cells())
    console.print(table)
    return 0 if all(goal.is_met for _, goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
