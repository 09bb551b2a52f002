"""The timeline of a pipeline: what each rank does when, from a simulation or from a real run."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from threefold.plan.pictures import style
from threefold.plan.schedule.simulator import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS: Final = {
    "forward": style.BLUE,
    "backward": style.ORANGE,
    "backward input": style.YELLOW,
    "backward weight": style.GREEN,
    "communication": style.PURPLE,
    "optimizer": style.RED,
    "other": style.BROWN,
}
"""What ranks do → its colour. Time without a span is waiting."""
OF_ACTION: Final = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}
"""Kind of an action → what ranks do."""
_LIGHT: Final = ("backward", "backward input", "backward weight")
_WIDTH, _MOST_DRAWN, _MOST_LABELS, _SMALLEST_LABEL = 16.0, 4000, 5000, 4.5


class TimeSpan(NamedTuple):
    """Something that a rank does without a pause.

    Attributes:
        rank: its number, from 0; drawn from the top.
        kind: of `KINDS`; another one is drawn as `other`.
        label: written where it fits, such as the number of a micro-batch.
        start, end: in the unit of the picture.
        chunk: of the rank's stages, from 0; later ones are drawn lighter.
    """

    rank: int
    kind: str
    label: str
    start: float
    end: float
    chunk: int = 0


def spans_of(timeline: Timeline) -> list[TimeSpan]:
    """The spans of a simulation, labelled with their micro-batches."""
    found = []
    for rank, order in enumerate(timeline.spans):
        chunk = {stage: number for number, stage in enumerate(sorted({action.stage for action, _, _ in order}))}
        for (stage, kind, micro_batch), start, end in order:
            found.append(TimeSpan(rank, OF_ACTION[kind], str(micro_batch), start, end, chunk[stage]))
    return found


def draw_timeline(path: Path, spans: Sequence[TimeSpan], title: str, unit: str = "ms", called: str = "stage") -> None:
    """Draw what each rank does when.

    Args:
        path: of the picture, .png or .svg.
        spans: of all ranks, in any order; those of a rank do not overlap, or later ones hide earlier ones.
        title: with the bubble, as the picture does not say it otherwise.
        unit: of the spans' times; thousands of ms are shown as s.
        called: what a row is: a stage or a rank.

    Raises:
        UserError: the picture cannot be written there.
    """
    style.check_picture(path)
    ranks = 1 + max((span.rank for span in spans), default=0)
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=1.0) - begin
    scale, unit = (1e-3, "s") if unit == "ms" and length >= 20_000 else (1.0, unit)
    moved = [span._replace(start=scale * (span.start - begin), end=scale * (span.end - begin)) for span in spans]
    length = length * scale or 1.0

    row = min(0.42, max(0.11, 9.0 / ranks))
    figure, axes = style.new_figure(_WIDTH, 1.35 + row * ranks, title)
    axes.set(xlim=(0, length), ylim=(ranks - 0.5, -0.5), xlabel=f"time ({unit})", ylabel=called)
    axes.barh(range(ranks), length, height=0.86, color=style.FAINT, linewidth=0)
    groups = _grouped(moved)
    chunks = 1 + max((chunk for _, chunk in groups), default=0)
    pixels = (_WIDTH - 1.3) * style.DPI / length  # of a unit of time
    for (kind, chunk), group in sorted(groups.items()):
        _draw(axes, group, style.lighter(KINDS[kind], 0.5 * chunk / chunks), pixels, len(spans) > _MOST_DRAWN)
    _label(axes, moved, pixels, row)
    _mark_ranks(axes, moved, ranks, length)
    _legend(axes, [kind for kind in KINDS if any(kind == found for found, _ in groups)], chunks)
    style.save(figure, path)


def _draw(
    axes: "Axes", group: Iterable[TimeSpan], color: tuple[float, float, float], pixels: float, rastered: bool
) -> None:
    """One collection for all spans of a colour: a picture may have a hundred thousand."""
    from matplotlib.collections import PolyCollection

    boxes = list(group)
    corners = [
        [
            (span.start, span.rank - 0.43),
            (span.start, span.rank + 0.43),
            (span.end, span.rank + 0.43),
            (span.end, span.rank - 0.43),
        ]
        for span in boxes
    ]
    narrowest = min(span.end - span.start for span in boxes) * pixels
    edge = 0.6 if narrowest > 12 else 0.3 if narrowest > 5 else 0.0
    axes.add_collection(
        PolyCollection(corners, facecolors=[color], edgecolors="white", linewidths=edge, rasterized=rastered),
        autolim=False,
    )


def _label(axes: "Axes", spans: Sequence[TimeSpan], pixels: float, row: float) -> None:
    """Write the labels of a kind where nearly all of them fit, in the largest size of type in which they do."""
    for group in _grouped(spans).values():
        named = sorted(((span.end - span.start) * pixels / len(span.label), span) for span in group if span.label)
        if not named or len(spans) > _MOST_LABELS:
            continue
        room = named[len(named) // 50][0] - 2  # pixels of a character; some spans of a real run are shorter than others
        size = min(style.SMALL_SIZE, 0.6 * 72 * row, room * 72 / style.DPI / 0.62)
        if size < _SMALLEST_LABEL:
            continue
        dark = group[0].kind not in _LIGHT and not group[0].chunk
        for space, span in named:
            if space > room:
                middle, color = (span.start + span.end) / 2, "white" if dark else style.INK
                axes.text(middle, span.rank, span.label, fontsize=size, color=color, ha="center", va="center_baseline")


def _grouped(spans: Sequence[TimeSpan]) -> dict[tuple[str, int], list[TimeSpan]]:
    """Spans of one colour each."""
    groups: dict[tuple[str, int], list[TimeSpan]] = {}
    for span in spans:
        groups.setdefault((span.kind if span.kind in KINDS else "other", span.chunk), []).append(span)
    return groups


def _mark_ranks(axes: "Axes", spans: Sequence[TimeSpan], ranks: int, length: float) -> None:
    """Numbers of ranks on the left, and on the right for which share of the time each works."""
    every = max(1, -(-ranks // 24))
    places = list(range(0, ranks, every))
    axes.set_yticks(places)
    busy = [0.0] * ranks
    for span in spans:
        busy[span.rank] += span.end - span.start
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, [f"{busy[rank] / length:.0%}" for rank in places])
    right.tick_params(labelsize=style.TEXT_SIZE, colors=style.INK, length=0)
    right.spines["right"].set_visible(False)
    right.set_ylabel("works", fontsize=style.TEXT_SIZE, color=style.INK)


def _legend(axes: "Axes", kinds: Sequence[str], chunks: int) -> None:
    from matplotlib.patches import Patch

    boxes = [Patch(facecolor=KINDS[kind], label=kind) for kind in kinds]
    boxes.append(Patch(facecolor=style.FAINT, label="wait"))
    if chunks > 1:
        boxes.append(Patch(facecolor="none", label=f"lighter: the later of a rank's {chunks} stages"))
    axes.legend(
        handles=boxes,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(boxes),
        frameon=False,
        fontsize=style.TEXT_SIZE,
        handlelength=1.2,
        columnspacing=1.4,
        borderaxespad=0.2,
    )
