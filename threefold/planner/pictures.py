"""Pictures of plans and runs: timelines of schedules, memory of stages, and layouts of a search."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from threefold.files import format_bytes
from threefold.foreign import FolderFiles, nofollow_file
from threefold.planner.schedule import Timeline
from threefold.planner.search import points_of
from threefold.report import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from threefold.planner.bounds import Evaluated
    from threefold.planner.planning import SearchAnswer


KINDS: Final = {
    "forward": figures.BLUE,
    "backward": figures.ORANGE,
    "backward input": figures.YELLOW,
    "backward weight": figures.GREEN,
    "communication": figures.PURPLE,
    "optimizer": figures.RED,
    "other": figures.BROWN,
}
"""Colour of each kind of span. Time without a span is waiting."""
OF_ACTION: Final = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}
"""Kind of span for each kind of action."""
_MOST_DRAWN, _MOST_LABELS, _SMALLEST_LABEL = 4000, 5000, 3.6
_DIGIT, _AROUND = 0.64, 2.2
"""Width of a digit as a fraction of the font size; space beside a label, in points."""


class TimeSpan(NamedTuple):
    """Activity of a rank without a pause, in ms.

    A rank is a row, from 0 at the top. A kind outside `KINDS` is drawn as `other`, a label where it fits, and later
    chunks (stages of the rank) lighter.
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


def draw_timeline(path: Path, spans: Sequence[TimeSpan], title: str, subtitle: str = "", called: str = "stage") -> None:
    """Draw a timeline of the ranks, in ms, and beside each rank the fraction of the drawn time in which it is busy.

    Where spans of a rank overlap, later ones hide earlier ones. The subtitle should give the bubble, as the picture
    does not. Many thousands of ms are shown as s; a row is `called` a stage or a rank.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    ranks = 1 + max((span.rank for span in spans), default=0)
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=1.0) - begin
    scale, unit = (1e-3, "s") if length >= 20_000 else (1.0, "ms")
    moved = [span._replace(start=scale * (span.start - begin), end=scale * (span.end - begin)) for span in spans]
    length = length * scale or 1.0

    row = min(0.36, max(0.09, 8.0 / ranks))
    figure, axes = figures.new_figure(0.95 + row * ranks, title, subtitle)
    axes.set(xlim=(0, length), ylim=(ranks - 0.5, -0.5), xlabel=f"time ({unit})", ylabel=called)
    axes.barh(range(ranks), length, height=0.86, color=figures.FAINT, linewidth=0)
    groups: dict[tuple[str, int], list[TimeSpan]] = {}
    for span in moved:
        groups.setdefault((span.kind if span.kind in KINDS else "other", span.chunk), []).append(span)
    chunks = 1 + max((chunk for _, chunk in groups), default=0)
    points = 72 * (figures.WIDTH - 1.1) / length  # per unit of time
    for (kind, chunk), group in sorted(groups.items()):
        # One collection for all spans of a colour, since a picture may have a hundred thousand.
        corners = [
            [(span.start, low), (span.start, high), (span.end, high), (span.end, low)]
            for span, low, high in ((span, span.rank - 0.43, span.rank + 0.43) for span in group)
        ]
        narrowest = min(span.end - span.start for span in group) * points
        boxes = PolyCollection(
            corners,
            facecolors=[figures.lighter(KINDS[kind], 0.5 * chunk / chunks)],
            edgecolors="white",
            linewidths=0.5 if narrowest > 6 else 0.25 if narrowest > 2.5 else 0.0,
            rasterized=len(spans) > _MOST_DRAWN,
        )
        axes.add_collection(boxes, autolim=False)
    if len(spans) <= _MOST_LABELS:
        for group in groups.values():
            _label_spans(axes, group, points, row)
    _mark_ranks(axes, moved, ranks, length)
    patches = [Patch(facecolor=KINDS[kind], label=kind) for kind in KINDS if any(kind == found for found, _ in groups)]
    patches.append(Patch(facecolor=figures.FAINT, label="waiting"))
    if chunks > 1:
        patches.append(Patch(facecolor="none", label=f"lighter: the later of a rank's {chunks} stages"))
    spaces = {"handlelength": 1.0, "columnspacing": 1.2, "borderpad": 0}
    style: dict[str, Any] = {"frameon": False, "fontsize": figures.TEXT_SIZE, **spaces}
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), **style)
    figures.save(figure, path)


def _label_spans(axes: "Axes", spans: Sequence[TimeSpan], points: float, row: float) -> None:
    """Write the labels of a kind if nearly all of them fit, in the largest font size that they fit in."""
    labelled = (span for span in spans if span.label)
    named = sorted(
        (((span.end - span.start) * points - _AROUND) / (_DIGIT * len(span.label)), span) for span in labelled
    )
    if not named:
        return
    room = named[len(named) // 50][0]  # largest font size that fits; a real run has some shorter spans
    size = min(figures.SMALL_SIZE, 0.6 * 72 * row, room)
    color = figures.INK if spans[0].kind.startswith("backward") or spans[0].chunk else "white"
    for fitting, span in named if size >= _SMALLEST_LABEL else ():
        if fitting >= room:
            middle = (span.start + span.end) / 2
            axes.text(middle, span.rank, span.label, fontsize=size, color=color, ha="center", va="center_baseline")


def _mark_ranks(axes: "Axes", spans: Sequence[TimeSpan], ranks: int, length: float) -> None:
    """Label the ranks on the left, and the fraction of time in which each is busy on the right."""
    places = list(range(0, ranks, max(1, -(-ranks // _MARKED))))
    axes.set_yticks(places)
    busy = [0.0] * ranks
    for span in spans:
        busy[span.rank] += span.end - span.start
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, [f"{busy[rank] / length:.0%}" for rank in places])
    right.tick_params(labelsize=figures.TEXT_SIZE, colors=figures.INK, length=0)
    right.spines["right"].set_visible(False)
    axes.text(1.0, -0.62, "  busy", transform=axes.get_yaxis_transform(), fontsize=figures.TEXT_SIZE, color=figures.INK)


_OTHERS: Final = {"gradient sum": "communication", "update": "optimizer", "data": "other"}
"""Kind in the picture of spans that are not pipeline actions; others are not drawn."""
NAME: Final = "timeline"


class MeasuredStep(NamedTuple):
    """Step of a real run, numbered from 1, from its recorded spans, whose times are in ms.

    The bubble is the fraction of the longest time from a stage's first action to its last that a stage waits, averaged
    over stages, as for a simulated schedule; the seconds are those from the first span's start to the last one's end.
    """

    number: int
    seconds: float
    bubble: float
    spans: list[TimeSpan]


def draw_run_timeline(path: Path, model: str) -> list[Path]:
    """Draw the step of median length next to the file of spans; return the paths of the PNG and the SVG, if any."""
    found = FolderFiles(path.parent).json(path.name)
    steps = measured_steps(found["ranks"])
    if not steps:
        return []
    median = median_low(each.seconds for each in steps)
    chosen = next(step for step in steps if step.seconds == median)
    title = f"{model} in {found['layout']}: step {chosen.number} of a run, measured"
    pictures = [path.with_name(f"{NAME}{suffix}") for suffix in (".png", ".svg")]
    for picture in pictures:
        draw_timeline(
            nofollow_file(picture), chosen.spans, title, about_step(chosen.seconds, chosen.bubble), called="pp rank"
        )
    return pictures


def about_step(seconds: float, bubble: float, called: str = "stage") -> str:
    """Return the subtitle of a step's timeline, which says what its two kinds of waiting mean."""
    time = f"{1000 * seconds:,.0f}" if seconds >= 1 else f"{1000 * seconds:.4g}"
    return (
        f"A step of {time} ms. Bubble {bubble:.1%}: time waited between the first and the last action of a {called}.\n"
        f"Busy: share of the whole step, with the waiting before the first action and after the last."
    )


def measured_steps(ranks: Sequence[Mapping[str, Any]]) -> list[MeasuredStep]:
    """Return in order the steps for which every stage's rank, given as `pp_rank` and `spans`, has actions."""
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


_GB: Final = 10**9


def draw_layouts(planned: "SearchAnswer", path: Path) -> None:
    """Draw the layouts that fit, by memory of the largest rank and tokens per second; name the best one, and the one of
    least memory among those almost as fast."""
    from matplotlib.ticker import EngFormatter

    request, found, best = planned.request, planned.found, planned.found.ranked[0]
    points = points_of(found, planned.costs)
    fastest = points.front[-1].tokens_per_second
    small = next(each for each in points.front if round(each.tokens_per_second / fastest, 2) >= 0.9)
    room = format_bytes(planned.usable_bytes)
    figure, axes = figures.new_figure(
        5.2,
        f"{request.config.model.title} on {request.gpus:,} × {request.hardware.title}: speed and memory of its layouts",
        f"{found.fitting:,} layouts fit into {room}, of {found.sound:,} sound ones; {request.objective.title}.",
    )
    tokens = request.tokens_per_step / points.seconds
    count = f"{len(tokens):,} of the" if len(tokens) < found.fitting else "the"
    label = f"{count} layouts that fit (quick estimates, a little too good)"
    axes.scatter(points.peak / _GB, tokens, s=4, color=figures.LINE, linewidths=0, rasterized=True, label=label)
    front = [[each.peak / _GB for each in points.front], [each.tokens_per_second for each in points.front]]
    label = "the fastest layout for its memory"
    axes.plot(*front, color=figures.BLUE, linewidth=1.5, marker="o", markersize=3.5, label=label)
    words: dict[str, Any] = {"fontsize": figures.TEXT_SIZE, "weight": "bold"}
    _mark(axes, best, "best", "*", figures.ORANGE, 13.0)
    _note(axes, "best", (best.peak / _GB, best.tokens_per_second), (-4, 9), ha="right", **words)
    if small.peak < best.peak:
        share = f"{small.tokens_per_second / best.tokens_per_second:.0%} of the speed"
        share += f" in {small.peak / best.peak:.0%} of the memory"
        _mark(axes, small, share, "D", figures.GREEN, 7.0)
        # The corner is free: with less memory, layouts are slower.
        words |= {"textcoords": "axes fraction", "va": "top", "arrowprops": {"arrowstyle": "-", "color": figures.GREY}}
        _note(axes, share, (small.peak / _GB, small.tokens_per_second), (0.02, 0.97), **words)
    limit = planned.usable_bytes / _GB
    _mark_limit(axes, limit, f"limit {room}", vertical=True)
    axes.set(xlabel="peak memory of the rank that needs the most (GB)", ylabel="tokens per second")
    axes.set_xlim(0, limit * 1.02)
    axes.set_ylim(0, 1.2 * max(float(tokens.max()), fastest))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color=figures.FAINT)
    others, speed, *named = zip(*axes.get_legend_handles_labels(), strict=True)
    handles, labels = zip(*named, speed, others, strict=True)
    figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=figures.TEXT_SIZE)
    figures.save(figure, path)


def _mark(axes: "Axes", layout: "Evaluated", word: str, marker: str, color: str, size: float) -> None:
    """Draw a layout's marker, which the legend explains."""
    label = f"{word}: {layout.choice}, {layout.tokens_per_second:,.0f} tokens/s in {format_bytes(layout.peak)}"
    style: dict[str, Any] = {"linestyle": "none", "markersize": size, "markeredgecolor": "white", "zorder": 4}
    axes.plot(layout.peak / _GB, layout.tokens_per_second, marker=marker, color=color, label=label, **style)


def _note(axes: "Axes", text: str, place: tuple[float, float], offset: tuple[float, float], **options: Any) -> None:
    """Write a text some points beside a place of the plot."""
    axes.annotate(text, place, xytext=offset, **{"textcoords": "offset points", "color": figures.INK, **options})


def _mark_limit(axes: "Axes", limit: float, text: str, *, vertical: bool = False) -> None:
    """Draw the memory that a rank may use as a red line, with its name along it."""
    style: dict[str, Any] = {"fontsize": figures.TEXT_SIZE, "color": figures.RED, "weight": "bold"}
    style["bbox"] = {"facecolor": "white", "linewidth": 0, "pad": 1, "alpha": 0.85}
    if vertical:
        axes.axvline(limit, color=figures.RED, linewidth=1.5)
        _note(axes, text, (limit, 0), (-4, 6), ha="right", va="bottom", rotation=90, **style)
    else:
        axes.axhline(limit, color=figures.RED, linewidth=1.5)
        _note(axes, text, (0, limit), (3, 3), xycoords=("axes fraction", "data"), va="bottom", **style)


CAUSES: Final = {
    "weights": figures.BLUE,
    "gradients": figures.ORANGE,
    "optimizer": figures.GREEN,
    "activations": figures.PURPLE,
    "working": figures.YELLOW,
    "logits": figures.CYAN,
    "buffers": figures.GREY,
    "fragmentation": figures.BROWN,
}
"""Colour of each cause, from the bottom up; red is the limit's."""
OF_ACTIVATIONS: Final = {"activations": "kept", "working": "working", "logits": "logits", "buffers": "buffers"}
"""Causes that are parts of the activations, and the names of these parts."""
_LABELLED_STAGES, _MARKED = 16, 24
"""Largest numbers of bars that get their sum above them, and of ranks that get their number."""


def draw_memory(path: Path, stages: Sequence[Mapping[str, int]], usable: int, title: str, subtitle: str = "") -> None:
    """Draw the memory of each pipeline rank, and the limit as a red line.

    Causes outside `CAUSES` are not drawn. The titles should say whether the layout fits, as the picture does not.
    """
    figure, axes = figures.new_figure(4.0, title, subtitle)
    places = range(len(stages))
    heights = [0.0] * len(stages)
    for cause, color in CAUSES.items():
        values = [stage.get(cause, 0) / _GB for stage in stages]
        if any(values):
            label = f"activations: {OF_ACTIVATIONS[cause]}" if cause in OF_ACTIVATIONS else cause
            axes.bar(places, values, width=0.7, bottom=heights, color=color, linewidth=0, label=label)
            heights = [height + value for height, value in zip(heights, values, strict=True)]
    limit = usable / _GB
    _mark_limit(axes, limit, f"limit {format_bytes(usable)}")
    if len(stages) <= _LABELLED_STAGES:
        for place, height in zip(places, heights, strict=True):
            style: dict[str, Any] = {"fontsize": figures.TEXT_SIZE, "ha": "center", "weight": "bold"}
            _note(axes, f"{height:.1f}", (place, height), (0, 3), **style)
    side = 0.6 + max(0, 4 - len(stages)) / 2  # a few bars are not as wide as the page
    axes.set(xlabel="pp rank", ylabel="peak memory (GB)", ylim=(0, 1.12 * max([limit, *heights])))
    axes.set_xlim(-side, len(stages) - 1 + side)
    axes.set_xticks(list(places)[:: max(1, -(-len(stages) // _MARKED))])
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=figures.TEXT_SIZE)
    figures.save(figure, path)


def draw_measured_memory(
    path: Path, measured: Sequence[Mapping[str, int]], estimated: Sequence[Mapping[str, int]], title: str
) -> None:
    """Draw the measured memory of each pipeline rank by cause and, lighter beside it, the estimated one, if any."""
    largest = max(sum(each.values()) for each in (*measured, *estimated))
    unit, scale = ("GB", 1e9) if largest >= 2e9 else ("MB", 1e6)
    beside = "Left: measured on the first rank of each stage. Right, lighter: estimated for its largest rank."
    figure, axes = figures.new_figure(4.0, title, beside if estimated else "Measured on the first rank of each stage.")
    width = 0.36 if estimated else 0.7
    for number, stages in enumerate((measured, estimated)):
        places = [place + (number - 0.5) * (width + 0.02) * bool(estimated) for place in range(len(stages))]
        heights = [0.0] * len(stages)
        for cause, color in CAUSES.items():
            values = [stage.get(cause, 0) / scale for stage in stages]
            if any(values):
                shade = figures.lighter(color, 0.5 * number)
                label = None if number else cause
                axes.bar(places, values, width=width, bottom=heights, color=shade, linewidth=0, label=label)
                heights = [height + value for height, value in zip(heights, values, strict=True)]
        if len(measured) <= _LABELLED_STAGES:
            for place, height in zip(places, heights, strict=True):
                text = f"{height:.3g}" if height < 1000 else f"{height:,.0f}"
                _note(axes, text, (place, height), (0, 3), fontsize=figures.TEXT_SIZE, ha="center", weight="bold")
    side = 0.6 + max(0, 4 - len(measured)) / 2
    axes.set(xlabel="pp rank", ylabel=f"memory ({unit})", ylim=(0, 1.12 * largest / scale or 1.0))
    axes.set_xlim(-side, len(measured) - 1 + side)
    axes.set_xticks(range(0, len(measured), max(1, -(-len(measured) // _MARKED))))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=figures.TEXT_SIZE)
    figures.save(figure, path)
