"""`threefold report`: settings, results and course of runs, as a table or a page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer
from typer import Argument, Option

from threefold.files import shown
from threefold.report.page import require_page
from threefold.terminal import print_warnings, setting_text, table

_LAYER_KINDS: Final = ("gradient", "update", "activation", "dead")  # of `log.layers`


def command(
    runs: list[Path] = Argument(..., metavar="RUN", help="Run folders."),
    html: Path | None = Option(None, metavar="FILE", help="Write a self-contained page, with curves to compare."),
    as_json: bool = Option(False, "--json", help="Print the data of the page as a JSON document."),
) -> None:
    """Report on runs, ended or not: what ran, losses, speed, time, memory, checkpoints, and settings that differ.

    At its end, a run writes its own report page to RUN/report.html.

    Examples:
      threefold report runs/run
      threefold report runs/first runs/second --html both.html
    """
    from rich.console import Console

    from threefold.report.record import RunRecord, require_run

    for folder in runs:
        require_run(folder)
    if html is not None:
        require_page(html)
    records = [RunRecord(folder) for folder in runs]
    for record in records:
        record.update()
    from threefold.report.document import report_of, write_page

    report = report_of(records)
    found, console = report["runs"], Console()
    for run in found:
        print_warnings(run["warnings"])
    if html is not None:
        write_page(html, report)
        typer.echo(f"Wrote {shown(html)}.", err=as_json)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    if as_json or html is not None:
        return
    names, left = tuple(run["name"] for run in found), "l" * (1 + len(found))
    rows = dict.fromkeys(name for run in found for name in run["summary"])
    cells = [(name, *(run["summary"].get(name, "–") for run in found)) for name in rows]
    console.print(table(("run", *names), cells, left, whole=(0,)))
    if report["comparison"]:
        typer.echo(report["comparison"])
    if report["differences"]:
        settings = [(name, *map(setting_text, values)) for name, values in report["differences"].items()]
        console.print(table(("setting", *names), settings, left))
    for run in found:
        if layers := layer_rows(run["logged"]["values"]):
            step = run["logged"]["last"][-1]
            console.print(table((f"{run['name']}, step {step:,}", *_LAYER_KINDS), layers, "lrrrr"))
    for run in found:
        for event in run["events"]:
            typer.echo(f"{run['name']}, step {event['step']:,}: {event['text']}")


def layer_rows(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each layer, its name and its last values, from what a run has logged; none without any."""
    found = [name.split("/", 2) for name in values if name.startswith("layers/") and name.count("/") > 1]

    def last(kind: str, layer: str) -> str:
        means = [each for each in values.get(f"layers/{kind}/{layer}", {"mean": ()})["mean"] if each is not None]
        return "–" if not means else f"{means[-1]:.1%}" if kind == "dead" else f"{means[-1]:.3g}"

    return [
        (layer, *(last(kind, layer) for kind in _LAYER_KINDS)) for layer in dict.fromkeys(each[2] for each in found)
    ]
