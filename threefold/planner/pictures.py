"""Pictures of plans and runs as PNG or SVG in one style: timelines of schedules, memory, and search results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from threefold.errors import UserError
from threefold.files import format_bytes, shown
from threefold.planner.planning import SearchAnswer
from threefold.planner.schedule import Timeline
from threefold.planner.search import points_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from threefold.planner.planning import SearchAnswer


SUFFIXES: Final = (".png", ".svg")
DPI: Final = 150

# Colour-blind readers can tell these apart, and in print their lightness does.
BLUE, ORANGE, GREEN, PURPLE, RED, BROWN = "#3d6fb4", "#e8893c", "#55a868", "#8d6cb5", "#c44e52", "#937860"
YELLOW, CYAN = "#f2c14e", "#64b5cd"
COLORS: Final = (BLUE, ORANGE, GREEN, PURPLE, RED, BROWN, YELLOW, CYAN)
"""Colours in the order in which causes or series use them."""
INK, FAINT, LINE = "#262626", "#e9e9e9", "#b5b5b5"
"""Colours of text; of empty space, such as waiting; of axes and grids."""

TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 12.0, 9.5, 7.0
_LETTER: Final = 0.1
"""Approximate width of a title's character, in inches."""
_MARGIN: Final = 1.0
"""Width of a figure that a title cannot use, in inches."""


def lighter(color: str, share: float) -> tuple[float, float, float]:
    """Mix a colour with white.

    Args:
        color: colour as `#rrggbb`.
        share: share of white, from 0 to 1.
    """
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part + (1 - part) * share for part in parts)
    return red, green, blue


def new_figure(width: float, height: float, title: str) -> "tuple[Figure, Axes]":
    """Make a figure with one plot in the common

    Args:
        width, height: size in inches.
        title: one or two lines, the first with what is shown and its most important number; long lines are wrapped.
    """
    from textwrap import fill

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white", dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    letters = int((width - _MARGIN) / _LETTER)
    title = "\n".join(fill(line, letters) for line in title.split("\n"))
    axes.set_title(title, fontsize=TITLE_SIZE, color=INK, loc="left", pad=8)
    axes.tick_params(labelsize=TEXT_SIZE, colors=INK, length=3)
    axes.xaxis.label.set(fontsize=TEXT_SIZE, color=INK)
    axes.yaxis.label.set(fontsize=TEXT_SIZE, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(LINE)
    return figure, axes


def check_picture(path: Path) -> None:
    """Raise an error for a path that no picture can be written to, before any work is done.

    Raises:
        UserError: the suffix is not one of `SUFFIXES`, or the folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"The picture {shown(path)} must end in .png or .svg; use {shown(path.with_suffix('.png'))}.")
    if not path.parent.is_dir():
        raise UserError(f"The picture {shown(path)} cannot be written: there is no folder {shown(path.parent)}.")
    if path.is_dir():
        raise UserError(f"The picture {shown(path)} cannot be written: that is a folder.")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG or SVG, by the suffix of its path.

    Raises:
        UserError: the file cannot be written.
    """
    check_picture(path)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UserError(f"The picture {shown(path)} cannot be written: {error.strerror or error}.") from None


KINDS: Final = {
    "forward": BLUE,
    "backward": ORANGE,
    "backward input": YELLOW,
    "backward weight": GREEN,
    "communication": PURPLE,
    "optimizer": RED,
    "other": BROWN,
}
"""Colour of each kind of span. Time without a span is waiting."""
OF_ACTION: Final = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}
"""Kind of span for each kind of action."""
_LIGHT: Final = ("backward", "backward input", "backward weight")
_WIDTH, _MOST_DRAWN, _MOST_LABELS, _SMALLEST_LABEL = 16.0, 4000, 5000, 4.5


class TimeSpan(NamedTuple):
    """Activity of a rank without a pause.

    Attributes:
        rank: row in the picture, from 0 at the top.
        kind: kind in `KINDS`; any other is drawn as `other`.
        label: text written where it fits, such as the micro-batch index.
        start, end: times in the unit of the picture.
        chunk: index of the stage on its rank; later ones are drawn lighter.
    """

    rank: int
    kind: str
    label: str
    start: float
    end: float
    chunk: int = 0


def spans_of(timeline: Timeline) -> list[TimeSpan]:
    """Return the spans of a simulation, labelled with their micro-batches."""
    found = []
    for rank, order in enumerate(timeline.spans):
        chunk = {stage: number for number, stage in enumerate(sorted({action.stage for action, _, _ in order}))}
        for (stage, kind, micro_batch), start, end in order:
            found.append(TimeSpan(rank, OF_ACTION[kind], str(micro_batch), start, end, chunk[stage]))
    return found


def draw_timeline(path: Path, spans: Sequence[TimeSpan], title: str, unit: str = "ms", called: str = "stage") -> None:
    """Draw a timeline of the ranks.

    Args:
        path: path of the picture, .png or .svg.
        spans: spans of all ranks, in any order; where spans of a rank overlap, later ones hide earlier ones.
        title: title, which should give the bubble, as the picture does not.
        unit: unit of the spans' times; thousands of ms are shown as s.
        called: name of a row: a stage or a rank.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    check_picture(path)
    ranks = 1 + max((span.rank for span in spans), default=0)
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=1.0) - begin
    scale, unit = (1e-3, "s") if unit == "ms" and length >= 20_000 else (1.0, unit)
    moved = [span._replace(start=scale * (span.start - begin), end=scale * (span.end - begin)) for span in spans]
    length = length * scale or 1.0

    row = min(0.42, max(0.11, 9.0 / ranks))
    figure, axes = new_figure(_WIDTH, 1.35 + row * ranks, title)
    axes.set(xlim=(0, length), ylim=(ranks - 0.5, -0.5), xlabel=f"time ({unit})", ylabel=called)
    axes.barh(range(ranks), length, height=0.86, color=FAINT, linewidth=0)
    groups: dict[tuple[str, int], list[TimeSpan]] = {}
    for span in moved:
        groups.setdefault((span.kind if span.kind in KINDS else "other", span.chunk), []).append(span)
    chunks = 1 + max((chunk for _, chunk in groups), default=0)
    pixels = (_WIDTH - 1.3) * DPI / length  # pixels per unit of time
    for (kind, chunk), group in sorted(groups.items()):
        # One collection for all spans of a colour, since a picture may have a hundred thousand.
        corners = [
            [(span.start, low), (span.start, high), (span.end, high), (span.end, low)]
            for span, low, high in ((span, span.rank - 0.43, span.rank + 0.43) for span in group)
        ]
        narrowest = min(span.end - span.start for span in group) * pixels
        boxes = PolyCollection(
            corners,
            facecolors=[lighter(KINDS[kind], 0.5 * chunk / chunks)],
            edgecolors="white",
            linewidths=0.6 if narrowest > 12 else 0.3 if narrowest > 5 else 0.0,
            rasterized=len(spans) > _MOST_DRAWN,
        )
        axes.add_collection(boxes, autolim=False)
    if len(spans) <= _MOST_LABELS:
        for group in groups.values():
            _label_spans(axes, group, pixels, row)
    _mark_ranks(axes, moved, ranks, length)
    patches = [Patch(facecolor=KINDS[kind], label=kind) for kind in KINDS if any(kind == found for found, _ in groups)]
    patches.append(Patch(facecolor=FAINT, label="wait"))
    if chunks > 1:
        patches.append(Patch(facecolor="none", label=f"lighter: the later of a rank's {chunks} stages"))
    options: dict[str, Any] = {"bbox_to_anchor": (1.0, 1.0), "frameon": False, "fontsize": TEXT_SIZE}
    options |= {"handlelength": 1.2, "columnspacing": 1.4, "borderaxespad": 0.2}
    axes.legend(handles=patches, loc="lower right", ncols=len(patches), **options)
    save(figure, path)


def _label_spans(axes: "Axes", spans: Sequence[TimeSpan], pixels: float, row: float) -> None:
    """Write the labels of a kind if nearly all of them fit, in the largest font size that they fit in."""
    named = sorted(((span.end - span.start) * pixels / len(span.label), span) for span in spans if span.label)
    if not named:
        return
    room = named[len(named) // 50][0] - 2  # pixels per character; a real run has some shorter spans
    size = min(SMALL_SIZE, 0.6 * 72 * row, room * 72 / DPI / 0.62)
    color = INK if spans[0].kind in _LIGHT or spans[0].chunk else "white"
    for space, span in named if size >= _SMALLEST_LABEL else ():
        if space > room:
            middle = (span.start + span.end) / 2
            axes.text(middle, span.rank, span.label, fontsize=size, color=color, ha="center", va="center_baseline")


def _mark_ranks(axes: "Axes", spans: Sequence[TimeSpan], ranks: int, length: float) -> None:
    """Label the ranks on the left, and the share of time that each works on the right."""
    every = max(1, -(-ranks // 24))
    places = list(range(0, ranks, every))
    axes.set_yticks(places)
    busy = [0.0] * ranks
    for span in spans:
        busy[span.rank] += span.end - span.start
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, [f"{busy[rank] / length:.0%}" for rank in places])
    right.tick_params(labelsize=TEXT_SIZE, colors=INK, length=0)
    right.spines["right"].set_visible(False)
    right.set_ylabel("works", fontsize=TEXT_SIZE, color=INK)


_OTHERS: Final = {"gradient sum": "communication", "update": "optimizer", "data": "other"}
"""Kind in the picture of spans that are no pipeline actions; others are not drawn."""
NAME: Final = "timeline"


class MeasuredStep(NamedTuple):
    """Step of a real run, from its recorded spans.

    Attributes:
        number: number of the step, from 1.
        seconds: time from the start of its first span to the end of its last, over all stages.
        bubble: share of the longest time from a stage's first action to its last that a stage waits, averaged over
            stages, as for a simulated schedule.
        spans: spans with times in ms.
    """

    number: int
    seconds: float
    bubble: float
    spans: list[TimeSpan]


def draw_run_timeline(path: Path) -> list[Path]:
    """Draw the step of median length next to the file of spans.

    Args:
        path: path of the file of spans.

    Returns:
        Paths of the PNG and the SVG; empty if no step is complete.

    Raises:
        UserError: a picture cannot be written.
        OSError: the file cannot be read.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    steps = measured_steps(found["ranks"])
    if not steps:
        return []
    median = median_low(each.seconds for each in steps)
    chosen = next(step for step in steps if step.seconds == median)
    title = (  # the legend is beside the second line
        f"Step {chosen.number} of a run, {found['layout']}: {1000 * chosen.seconds:,.0f} ms\n"
        f"measured bubble {chosen.bubble:.1%}"
    )
    pictures = [path.with_name(f"{NAME}{suffix}") for suffix in (".png", ".svg")]
    for picture in pictures:
        draw_timeline(picture, chosen.spans, title, called="pp rank")
    return pictures


def measured_steps(ranks: Sequence[Mapping[str, Any]]) -> list[MeasuredStep]:
    """Return in order the steps for which every stage's rank has actions.

    Args:
        ranks: `pp_rank` and `spans` of each rank, the spans with the fields of `Span`.
    """
    numbers = [{span["step"] for span in rank["spans"] if span["kind"]} for rank in ranks]
    return [_step(ranks, number) for number in sorted(set.intersection(*numbers))] if numbers else []


def _step(ranks: Sequence[Mapping[str, Any]], number: int) -> MeasuredStep:
    drawn: list[TimeSpan] = []
    busy, spent = list[float](), list[float]()
    for rank in ranks:
        spans = [span for span in rank["spans"] if span["step"] == number]
        actions = [span for span in spans if span["kind"]]
        busy.append(sum(span["end"] - span["start"] for span in actions))
        spent.append(max(span["end"] for span in actions) - min(span["start"] for span in actions))
        chunk = {stage: place for place, stage in enumerate(sorted({span["stage"] for span in actions}))}
        for span in spans:
            kind = OF_ACTION.get(span["kind"]) or _OTHERS.get(span["name"])
            if kind is not None:
                label = str(span["micro_batch"]) if span["kind"] else ""
                times = 1000 * span["start"], 1000 * span["end"]
                drawn.append(TimeSpan(rank["pp_rank"], kind, label, *times, chunk.get(span["stage"], 0)))
    longest = max(spent)
    seconds = (max(span.end for span in drawn) - min(span.start for span in drawn)) / 1000
    return MeasuredStep(number, seconds, 1 - sum(busy) / (longest * len(busy)), drawn)


_LABELLED: Final = 3
"""Number of best layouts that are described in words."""
_ROOM: Final = 1.3
"""Height of the picture relative to the fastest layout, which leaves room for the labels."""
_GB: Final = 10**9


def draw_layouts(planned: "SearchAnswer", path: Path) -> None:
    """Draw the layouts that fit, by memory of the largest rank and tokens per second.

    Args:
        planned: answer of a search.
        path: path of the picture, `.png` or `.svg`.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.ticker import EngFormatter

    request, found, best = planned.request, planned.found, planned.found.ranked
    model = request.config.model.preset or request.config.model.architecture
    title = (
        f"{model} on {request.gpus:,} × {request.hardware.title}: best {best[0].tokens_per_second:,.0f} tokens/s\n"
        f"{found.fitting:,} layouts that fit, of {found.sound:,} sound ones"
    )
    figure, axes = new_figure(10, 6, title)
    points = points_of(found, planned.costs)
    tokens = request.tokens_per_step / points.seconds
    limit = planned.usable_bytes / _GB
    style: dict[str, Any] = {"color": lighter(BLUE, 0.5), "linewidths": 0, "label": "a layout, as bounded"}
    axes.scatter(points.peak / _GB, tokens, s=6, rasterized=True, **style)
    front = [[each.peak / _GB for each in points.front], [each.tokens_per_second for each in points.front]]
    style = {"color": BLUE, "linewidth": 1.5, "label": "the fastest of each tenth less memory"}
    axes.plot(*front, marker="o", markersize=4, **style)
    peaks, rates = [each.peak / _GB for each in best], [each.tokens_per_second for each in best]
    label = f"the best {len(best)} by {request.objective.name}"
    axes.scatter(peaks, rates, s=30, color=ORANGE, zorder=3, label=label)
    label = f"memory that a rank may use, {format_bytes(planned.usable_bytes)}"
    axes.axvline(limit, color=RED, linestyle="--", linewidth=1.2, label=label)
    axes.set(xlabel="memory of the rank that needs the most, GB", ylabel="tokens per second")
    axes.set_xlim(0, limit * 1.03)
    axes.set_ylim(0, max([float(tokens.max()), *rates]) * _ROOM)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color=LINE, alpha=0.3)
    axes.set_axisbelow(True)
    _note(axes, "1", (peaks[0], rates[0]), (0, 6), fontsize=TEXT_SIZE, ha="center")
    told = [
        f"{place}  {each.choice}: {each.seconds:.4g} s a step, {format_bytes(each.peak)}"
        for place, each in enumerate(best[:_LABELLED], 1)
    ]
    axes.text(0.015, 0.975, "\n".join(told), transform=axes.transAxes, va="top", fontsize=TEXT_SIZE, color=INK)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=TEXT_SIZE)
    save(figure, path)


def _note(axes: "Axes", text: str, place: tuple[float, float], offset: tuple[int, int], **options: Any) -> None:
    """Write a text some points beside a place of the plot."""
    axes.annotate(text, place, xytext=offset, textcoords="offset points", color=INK, **options)


CAUSES: Final = {
    "weights": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": PURPLE,
    "working": YELLOW,
    "logits": RED,
    "buffers": CYAN,
    "fragmentation": BROWN,
}
"""Colour of each cause, from the bottom up."""
_LABELLED_STAGES: Final = 32
"""Largest number of bars that get their sum above them."""
_MARKED: Final = 24
"""Largest number of ranks that get their number below them."""


def draw_memory(path: Path, stages: Sequence[Mapping[str, int]], usable: int, title: str) -> None:
    """Draw the memory of each pipeline rank.

    Args:
        path: path of the picture, .png or .svg.
        stages: bytes by cause of each rank; causes outside `CAUSES` are not drawn.
        usable: bytes that a rank may use, drawn as a line.
        title: title, which should say whether the layout fits, as the picture does not.

    Raises:
        UserError: the picture cannot be written.
    """
    check_picture(path)
    figure, axes = new_figure(min(16.0, max(7.0, 2.8 + 0.55 * len(stages))), 4.6, title)
    places = range(len(stages))
    heights = [0.0] * len(stages)
    for cause, color in CAUSES.items():
        values = [stage.get(cause, 0) / _GB for stage in stages]
        if any(values):
            axes.bar(places, values, width=0.78, bottom=heights, color=color, linewidth=0, label=cause)
            heights = [height + value for height, value in zip(heights, values, strict=True)]
    limit = usable / _GB
    top = max([limit, *heights])
    axes.axhline(limit, color=INK, linewidth=1.2, linestyle=(0, (5, 3)))
    beside = {"xycoords": ("axes fraction", "data"), "fontsize": SMALL_SIZE + 1, "va": "center"}
    _note(axes, f"usable {limit:.0f} GB", (1.0, limit), (4, 0), **beside)
    if len(stages) <= _LABELLED_STAGES:
        for place, height in zip(places, heights, strict=True):
            _note(axes, f"{height:.1f}", (place, height), (0, 2), fontsize=SMALL_SIZE, ha="center")
    axes.set(xlabel="pp rank", ylabel="peak memory (GB)", ylim=(0, 1.08 * top), xlim=(-0.6, len(stages) - 0.4))
    axes.set_xticks(list(places)[:: max(1, -(-len(stages) // _MARKED))])
    handles, labels = axes.get_legend_handles_labels()
    options: dict[str, Any] = {"loc": "outside right center", "frameon": False, "fontsize": TEXT_SIZE}
    figure.legend(handles[::-1], labels[::-1], reverse=False, **options)
    save(figure, path)
