"""`threefold show`: a layout in one page, one JSON document or one table."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from typer import Option

from threefold import terminal
from threefold.doors import require_installed
from threefold.errors import UserError
from threefold.files import counted, format_bytes, read_json, shown
from threefold.planner.commands.estimate import HardwareName
from threefold.report import progress
from threefold.report.page import fill_page, json_in_script, require_page

if TYPE_CHECKING:
    from threefold.config import Config

_BLOCKS: Final = "blocks.*."
_WHEN: Final = {
    "pass": "each pass",
    "backward": "each backward pass",
    "send": "after passes",
    "start": "at the start",
    "end": "at the end",
}


def command(
    config: terminal.ConfigFile,
    html: Path | None = Option(None, metavar="FILE", help="Write a self-contained page, as .html."),
    as_json: bool = Option(False, "--json", help="Print the document behind the page (docs/show.md)."),
    compare: str | None = Option(
        None,
        metavar="OTHER",
        help="Also show what moves to another layout, given as a config or in words such as dp4,tp2.",
    ),
    verify: Path | None = Option(
        None,
        metavar="REPORT",
        help="Also show the error of each parameter, from the output of threefold verify --json.",
    ),
    hardware: HardwareName = None,
    traffic: bool = Option(True, "--traffic/--no-traffic", help="Dry-run each stage to count its collectives."),
    model: terminal.ModelFile = None,
    trust_code: terminal.TrustCode = False,
    overrides: terminal.Overrides = None,
) -> None:
    """Show the layout of CONFIG: ranks, shards of each weight, pipeline schedule, memory and collectives.

    The data need not exist. Without --hardware, times are relative, and only the memory of CPU ranks has a
    limit.

    Examples:
      threefold show run.yaml --html layout.html --hardware h100
      threefold show run.yaml --compare dp4,tp2
    """
    if html is not None:
        if html.suffix.lower() != ".html":
            raise UserError(f"The page {shown(html)} must end in .html; use {shown(html.with_suffix('.html'))}.")
        require_page(html)
    resolved = terminal.read_without_data(config, overrides, model, trust_code)
    other: Config | None = None
    if compare is not None and (compare.lower().endswith((".yaml", ".yml")) or Path(compare).exists()):
        other = terminal.read_without_data(Path(compare), None, model, trust_code)
    elif compare is not None:
        require_installed("verify", "--compare")
        from threefold.comm.layout import parse
        from threefold.models.source import ConfigSource
        from threefold.parallel.layout_check import check_layout
        from threefold.verify.layouts import compose, suits

        other = compose(resolved, parse(compare))
        suits(other)
        check_layout(ConfigSource(), other)
    report = None if verify is None else read_json(verify, "the report ", finite=False)
    from threefold.planner.hardware import find_hardware
    from threefold.planner.layout_document import layout_document, moves, proof

    entry = None if hardware is None else find_hardware(hardware)
    moved = None if other is None else moves(resolved, other)
    with progress.Steps("Running", lines=True, quiet=progress.QUIET) as steps:
        document = layout_document(resolved, entry, traffic=traffic, tell=steps.tell)
    document["compare"] = moved
    document["proof"] = None if verify is None else proof(report, f"The report {shown(verify)}", document)
    if html is not None:
        try:
            html.write_text(layout_page(document), encoding="utf-8")
        except OSError as error:
            raise UserError(f"The page {shown(html)} cannot be written: {error.strerror}.") from None
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False))
        return
    _print_document(document)
    if html is not None:
        typer.echo(f"The page: {html}")


def layout_page(document: Mapping[str, Any]) -> str:
    """Return the page of a document, as `planner.layout_document` makes it."""
    folder = files("threefold.planner") / "page"
    names = ("layout.html", "layout.css", "common.js", "layout.js", "tabs.js")
    page, style, *scripts = [(folder / name).read_text(encoding="utf-8") for name in names]
    return fill_page(page, {"style": style, "script": "\n".join(scripts), "document": json_in_script(document)})


def _print_document(document: dict[str, Any]) -> None:
    """Print a summary of the layout: stages with ranks, memory and bubble; weights and shards; collectives."""
    mesh, schedule, model = document["layout"], document["schedule"], document["model"]
    axes, zero = mesh["axes"], mesh["settings"]["zero"]
    typer.echo(
        f"{model['name']}, {model['parameters']:,} parameters: {mesh['name']}{f', zero {zero}' if zero else ''}, "
        f"{counted(mesh['world'], 'rank')}, {mesh['dtype']}."
    )
    micro_batches = counted(schedule["micro_batches"], "micro-batch", "es")
    typer.echo(f"{schedule['name']}: {micro_batches}, bubble {schedule['bubble']:.1%}.")
    _print_stages(document)
    rows = []
    for kind in document["tensors"]:
        largest = max(kind["shards"], key=lambda bounds: [end - start for start, end in bounds])
        cuts = [axis for axis, _ in kind["cuts"] if axes[axis] > 1] + ["zero"] * bool(zero)
        held = " × ".join(f"{end - start:,}" for start, end in largest)
        whole = " × ".join(f"{size:,}" for size in kind["shape"])
        rows.append((kind["name"], whole, ", ".join(cuts) or "–", held))
    terminal.print_table(("weight", "shape", "sharded by", "a rank has"), _without_repeated(rows))
    if document["collectives"]["ranks"] is not None:
        first = document["collectives"]["ranks"][0]  # the other stages' are in the document
        sent = [
            (each["axis"], each["operation"], f"{each['count']:,}", format_bytes(each["bytes"]), _WHEN[each["when"]])
            for each in first["collectives"]
            if each["axis"] != "world"
        ]
        if sent:
            terminal.print_table((f"axis, rank {first['rank']}", "collective", "count", "bytes", "when"), sent)
    if (moved := document["compare"]) is not None:
        typer.echo(f"To {moved['layout']['name']}, weights of each rank:")
        names = ("kept", "received", "dropped")
        moves = [
            (str(rank["rank"]), *(format_bytes(rank[name] * moved["itemsize"]) for name in names))
            for rank in moved["ranks"]
        ]
        terminal.print_table(("rank", *names), terminal.shortened(moves))
    if (proof := document["proof"]) is not None:
        worst = max(
            (float(error), name)  # `inf` is a number's name, too
            for name, errors in zip(proof["parameters"], proof["errors"], strict=True)
            for error in errors
            if error is not None
        )
        equal = sum(each["verdict"] == "equal" for each in proof["layouts"])
        typer.echo(
            f"Verified: {equal} of {counted(len(proof['layouts']), 'layout')} equal; the worst error is "
            f"{worst[0]:.1e}, of {worst[1]}, and {proof['tolerance']:.0e} is allowed."
        )


def _without_repeated(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows of weights, with one for all weights of a block elsewhere (multi-token prediction) that are like
    those of `blocks`."""
    usual = {name.removeprefix(_BLOCKS): tuple(cells) for name, *cells in rows if name.startswith(_BLOCKS)}
    parents = {name[: -len(of_block) - 1] for name, *_ in rows for of_block in usual if name.endswith(f".{of_block}")}
    alike = {
        f"{parent}."
        for parent in parents - {_BLOCKS.rstrip(".")}
        if len(own := [row for row in rows if row[0].startswith(f"{parent}.")]) > 1
        and all(usual.get(name.removeprefix(f"{parent}.")) == tuple(cells) for name, *cells in own)
    }
    kept: dict[str, tuple[str, ...]] = {}
    for row in rows:
        whole = next((parent for parent in sorted(alike, key=len) if row[0].startswith(parent)), None)
        if whole is None:
            kept[row[0]] = row
        else:
            kept[whole] = (f"{whole}*", f"as {_BLOCKS[:-1]}", "", "")
    return list(kept.values())


def _print_stages(document: dict[str, Any]) -> None:
    layers, memory, schedule = document["model"]["layers"], document["memory"], document["schedule"]
    rows = []
    for number in range(document["layout"]["axes"]["pp"]):
        ranks = [each["rank"] for each in document["layout"]["ranks"] if each["pp"] == number]
        named = " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} {ranks[1]} … {ranks[-1]}"
        held = [
            terminal.first_to_last(layers[stage["first_layer"] : stage["end_layer"]])
            for stage in document["stages"]
            if stage["pp_rank"] == number
        ]
        peak = "?" if memory["stages"] is None else format_bytes(sum(memory["stages"][number].values()))
        works = schedule["busy"][number] / schedule["longest"]
        rows.append((str(number), named, ", ".join(held), peak, f"{works:.0%}"))
    terminal.print_table(("pp rank", "ranks", "layers", "memory", "works"), terminal.shortened(rows))
    if memory["limit"] is not None:
        typer.echo(f"Memory of a rank: {format_bytes(memory['limit'])} ({memory['limit_of']}).")
    elif memory["why"]:
        typer.echo(f"No memory: {memory['why']}")
