"""`threefold plan`: search the layouts of a number of GPUs, and write the best one as a config."""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import typer
from typer import Option

from threefold.errors import UserError
from threefold.files import format_bytes, shown
from threefold.planner.commands.estimate import AsJson, HardwareName, chosen_hardware
from threefold.report.figures import require_picture
from threefold.report.options import whole_number
from threefold.terminal import ConfigFile, Overrides, TrustCode, read_config, table

if TYPE_CHECKING:
    from rich.console import Console

    from threefold.planner.bounds import Evaluated
    from threefold.planner.planning import Budget, SearchAnswer


def command(
    config: ConfigFile,
    gpus: str | None = Option(None, metavar="N", help="Number of devices.", show_default=False),
    hardware: HardwareName = None,
    objective: str = Option(
        "throughput",
        metavar="NAME",
        help="What to optimize: throughput on all N GPUs; or, on at most N, cost per token or latency of a step.",
    ),
    tokens: str | None = Option(
        None, metavar="T", help="Tokens to train on, such as 300B.", show_default="the tokens of train.max_steps"
    ),
    fix: list[str] | None = Option(
        None, metavar="SECTION.KEY=VALUE", help="Setting to fix in every layout; may be repeated."
    ),
    system: str | None = Option(
        None,
        metavar="NAME",
        help="System whose kernels and memory are assumed, as for estimate.",
        show_default="own, as train runs it",
    ),
    write: Path | None = Option(None, metavar="FILE", help="Write the config with the best layout."),
    png: Path | None = Option(None, metavar="FILE", help="Draw memory against throughput."),
    why: bool = Option(False, "--why", help="List the rules by which layouts are left out, with an example of each."),
    as_json: AsJson = False,
    trust_code: TrustCode = False,
    overrides: Overrides = None,
) -> None:
    """Find the best layout for training CONFIG on N GPUs of one type, without needing any of them.

    Considers all valid values of dp, tp, pp, cp, ep, ZeRO, schedule, chunks, micro-batch, recompute and
    sequence parallelism.
    The global batch stays the same, and so do the losses.

    Examples:
      threefold plan run.yaml --gpus 16 --hardware a100-40 --write best.yaml
      threefold plan run.yaml --gpus 64 --hardware h100 --png layouts.png
    """
    began = perf_counter()
    from threefold.config.section import MOST_RANKS
    from threefold.planner.planning import config_text, plan_layouts, read_request, require_no_layout, require_plan_file

    if gpus is None:
        raise UserError("--gpus is missing; say how many there are, such as --gpus 8.")
    entry, count = chosen_hardware(hardware), whole_number(gpus, "--gpus", most=MOST_RANKS)
    if write is not None:
        require_plan_file(write)
    if png is not None:
        require_picture(png)
    require_no_layout(overrides or ())
    given = read_config(config, overrides, trust_code=trust_code)
    request = read_request(given, count, entry, objective, fix or (), tokens, system)
    planned = plan_layouts(request, lambda: perf_counter() - began)
    if write is not None:
        asked = f"{config} --gpus {gpus} --hardware {hardware}" + (f" --tokens {tokens}" if tokens else "")
        best, budget = planned.best, planned.budget(planned.best)
        steps = None if tokens is None or budget is None else budget.steps
        predicted = [
            f"Predicted on {best.choice.gpus:,} × {entry.title}, --system {request.system.name}: {best.seconds:.3f} s "
            f"a step, {best.tokens_per_second:,.0f} tokens/s, MFU {best.mfu:.1%}.",
            f"Peak memory {format_bytes(best.peak)} of {format_bytes(planned.usable_bytes)} that a rank may use; "
            f"limited by {_limit(best)}.",
        ]
        if budget is not None:
            told = _told(budget)
            predicted.append(f"{told[0].upper()}{told[1:]}.")
        text = config_text(given, best.choice, asked, predicted, steps)
        try:
            write.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{shown(write)} cannot be written ({error.strerror}).") from None
    if png is not None:
        from threefold.planner.pictures import draw_layouts

        draw_layouts(planned, png)
    if as_json:
        typer.echo(_as_json(planned))
    else:
        _print_plan(planned, write, png, why)


_WIDTH_OF_A_FILE: Final = 180
_IF_ROOM: Final = {"limited by": 100, "MFU": 20, "tokens/s": 20}
"""Columns that a narrow table drops, in this order, and the width that the layout column needs to keep each."""
_BETWEEN: Final = 3


def _print_plan(planned: "SearchAnswer", written: Path | None, drawn: Path | None, why: bool) -> None:
    request, found = planned.request, planned.found
    train, model = request.config.train, request.config.model
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE, highlight=False)
    console.print(
        f"{model.title}: {train.global_batch_size:,} sequences of "
        f"{request.config.data.sequence_length:,} tokens a step, {request.config.precision.dtype}, on "
        f"{request.gpus:,} × {request.hardware.title} by kernels of {request.system.name}; {request.objective.title}."
    )
    console.print(
        f"{found.considered:,} layouts: {found.sound:,} are sound, of which {found.fitting:,} fit into "
        f"{format_bytes(planned.usable_bytes)}; {planned.seconds:.1f} s."
    )
    _print_best(console, found.ranked)
    if (misfit := found.misfit) is not None:
        console.print(
            f"{misfit.count:,} do not fit, such as {misfit.nearest}: the example needs "
            f"{format_bytes(planned.unfit_bytes)}, of which {misfit.part}."
        )
    if why and found.refusals:
        refused = [(f"{each.count:,}", each.sentence, each.example) for each in found.refusals]
        made = table(("left out", "why", "such as"), refused, "rll", pad_edge=False)
        made.columns[1].max_width = 80
        console.print(made)
    elif found.refusals:
        console.print(f"{found.considered - found.sound:,} are not valid; --why lists the rules.")
    budget = planned.budget(planned.best)
    if budget is not None:
        console.print(f"The first: {_told(budget)}.")
    if written is not None:
        console.print(f"Wrote the config of the first to {written}; check it with threefold dry-run {written}.")
    if drawn is not None:
        console.print(f"Drew memory against throughput in {drawn}.")


def _as_json(planned: "SearchAnswer") -> str:
    request, found, misfit = planned.request, planned.found, planned.found.misfit
    best = []
    for each in found.ranked:
        values = {
            "layout": str(each.choice.spec),
            "settings": each.choice.settings(),
            "gpus": each.choice.gpus,
            "step_seconds": each.seconds,
            "tokens_per_second": each.tokens_per_second,
            "mfu": each.mfu,
            "peak_bytes": list(each.peak_bytes),  # where the two differ, `details` has the value of `estimate`
            "limited_by": [{"cause": cause, "share": share} for cause, share in each.limits],
            **each.details,
        }
        if (budget := planned.budget(each)) is not None:
            values["budget"] = {
                name: getattr(budget, name) for name in ("tokens", "steps", "days", "gpu_hours", "dollars")
            }
        best.append(values)
    document: dict[str, Any] = {
        "gpus": request.gpus,
        "hardware": request.hardware.name,
        "system": request.system.name,
        "objective": request.objective.name,
        "layouts": found.considered,
        "sound": found.sound,
        "fitting": found.fitting,
        "evaluated": found.evaluated,
        "usable_bytes": planned.usable_bytes,
        "seconds": round(planned.seconds, 3),
        "refused": [
            {"setting": each.key, "count": each.count, "example": each.example, "reason": each.sentence}
            for each in found.refusals
        ],
        "too_large": misfit
        and {
            "count": misfit.count,
            "nearest": str(misfit.nearest),
            "bytes": planned.unfit_bytes,
            "short_bytes": planned.unfit_bytes - planned.usable_bytes,
            "largest_part": misfit.part,
        },
        "best": best,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _print_best(console: "Console", ranked: list["Evaluated"]) -> None:
    """Print the best layouts; a narrow console drops the columns of `_IF_ROOM`, so that no number is cut off."""
    columns: dict[str, list[str]] = {
        "": [str(place) for place in range(1, len(ranked) + 1)],
        "layout": [str(each.choice.spec) for each in ranked],
        "GPUs": [f"{each.choice.gpus:,}" for each in ranked],
        "micro-batch": [f"{each.choice.micro_batch_size} × {each.choice.accumulation}" for each in ranked],
        "step": [f"{each.seconds:,.3f} s" for each in ranked],
        "tokens/s": [f"{each.tokens_per_second:,.0f}" for each in ranked],
        "MFU": [f"{each.mfu:.1%}" for each in ranked],
        "memory": [format_bytes(each.peak) for each in ranked],
        "limited by": [_limit(each) for each in ranked],
    }
    if len(set(columns["GPUs"])) == 1:
        del columns["GPUs"]
    for name, room in _IF_ROOM.items():
        widths = [_BETWEEN + max(map(len, [each, *cells])) for each, cells in columns.items() if each != "layout"]
        longest = max(map(len, columns["layout"]))
        if sum(widths) + _BETWEEN + min(room, longest) > console.width:
            del columns[name]
    align = "".join("l" if name in ("layout", "limited by") else "r" for name in columns)
    whole = [number for number, name in enumerate(columns) if name != "layout"]
    console.print(table([*columns], [*zip(*columns.values(), strict=True)], align, whole, pad_edge=False))
    if "limited by" not in columns:
        console.print(f"The first is limited by {_limit(ranked[0])}.")


def _limit(layout: "Evaluated") -> str:
    return ", ".join(f"{cause} {share:.0%}" for cause, share in layout.limits)


def _told(budget: "Budget") -> str:
    def rounded(value: float) -> str:
        return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"

    dollars = ""
    if budget.dollars is not None:
        dollars = f", ${rounded(budget.dollars)} at ${budget.dollars_per_hour:.2f} per GPU-hour"
    times = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 0))
    unit, least = next((unit, least) for unit, least in times if budget.seconds >= least)
    time = f"{budget.seconds / (least or 1):,.1f} {unit}, {rounded(budget.gpu_hours)} GPU-hours"
    units = (("T", 10**12), ("B", 10**9), ("M", 10**6))
    amounts = (f"{budget.tokens / scale:.3g}{unit}" for unit, scale in units if budget.tokens >= scale)
    return f"{next(amounts, f'{budget.tokens:,}')} tokens are {budget.steps:,} steps, {time}{dollars}"
