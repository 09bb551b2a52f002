"""Pictures of a search and of memory: layouts by memory and throughput with their Pareto front, and bytes by cause."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from threefold.files import format_bytes
from threefold.planner import timeline as style
from threefold.planner.search.bounds import Evaluated
from threefold.planner.search.planning import SearchAnswer
from threefold.planner.search.search import points_of
from threefold.planner.timeline import BLUE, INK, LINE, ORANGE, RED, TEXT_SIZE, lighter, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LABELLED: Final = 3
"""Number of best layouts that are described in words."""
_ROOM: Final = 1.3
"""Height of the picture relative to the fastest layout, which leaves room for the labels."""
_GB: Final = 1e9


def draw_layouts(planned: SearchAnswer, path: Path) -> None:
    """Draw the layouts that fit, by memory of the largest rank and tokens per second.

    Args:
        planned: answer of a search.
        path: path of the picture, `.png` or `.svg`.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.ticker import EngFormatter

    request, best = planned.request, planned.best
    model = request.config.model.preset or request.config.model.architecture
    title = (
        f"{model} on {request.gpus:,} × {request.hardware.title}: best {best.tokens_per_second:,.0f} tokens/s\n"
        f"{planned.found.fitting:,} layouts that fit, of {planned.found.sound:,} sound ones"
    )
    figure, axes = new_figure(10, 6, title)
    _draw(axes, planned)
    axes.set(xlabel="memory of the rank that needs the most, GB", ylabel="tokens per second")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color=LINE, alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=TEXT_SIZE)
    save(figure, path)


def _draw(axes: "Axes", planned: SearchAnswer) -> None:
    points, best = points_of(planned.found, planned.costs), planned.found.ranked
    tokens = planned.request.tokens_per_step / points.seconds
    cloud = lighter(BLUE, 0.5)
    axes.scatter(
        points.peak / _GB, tokens, s=6, color=cloud, linewidths=0, label="a layout, as bounded", rasterized=True
    )
    axes.plot(
        [each.peak / _GB for each in points.front],
        [each.tokens_per_second for each in points.front],
        color=BLUE,
        linewidth=1.5,
        marker="o",
        markersize=4,
        label="the fastest of each tenth less memory",
    )
    axes.scatter(
        [each.peak / _GB for each in best],
        [each.tokens_per_second for each in best],
        s=30,
        color=ORANGE,
        zorder=3,
        label=f"the best {len(best)} by {planned.request.objective.name}",
    )
    limit = planned.usable_bytes / _GB
    label = f"memory that a rank may use, {format_bytes(planned.usable_bytes)}"
    axes.axvline(limit, color=RED, linestyle="--", linewidth=1.2, label=label)
    axes.set_xlim(0, limit * 1.03)
    fastest = max([float(np.max(tokens)), *(each.tokens_per_second for each in best)])
    axes.set_ylim(0, fastest * _ROOM)
    first = best[0]
    axes.annotate(
        "1",
        (first.peak / _GB, first.tokens_per_second),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=TEXT_SIZE,
        color=INK,
    )
    told = [_label(place, each) for place, each in enumerate(best[:_LABELLED], 1)]
    axes.text(0.015, 0.975, "\n".join(told), transform=axes.transAxes, va="top", fontsize=TEXT_SIZE, color=INK)


def _label(place: int, layout: Evaluated) -> str:
    return f"{place}  {layout.choice}: {layout.seconds:.4g} s a step, {format_bytes(layout.peak)}"


CAUSES: Final = {
    "weights": style.BLUE,
    "gradients": style.ORANGE,
    "optimizer": style.GREEN,
    "activations": style.PURPLE,
    "working": style.YELLOW,
    "logits": style.RED,
    "buffers": style.CYAN,
    "fragmentation": style.BROWN,
}
"""Colour of each cause, from the bottom up."""
_GIGABYTE: Final = 10**9
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
    style.check_picture(path)
    figure, axes = style.new_figure(min(16.0, max(7.0, 2.8 + 0.55 * len(stages))), 4.6, title)
    places = range(len(stages))
    heights = [0.0] * len(stages)
    for cause, color in CAUSES.items():
        values = [stage.get(cause, 0) / _GIGABYTE for stage in stages]
        if any(values):
            axes.bar(places, values, width=0.78, bottom=heights, color=color, linewidth=0, label=cause)
            heights = [height + value for height, value in zip(heights, values, strict=True)]
    limit = usable / _GIGABYTE
    top = max([limit, *heights])
    axes.axhline(limit, color=style.INK, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate(
        f"usable {limit:.0f} GB",
        (1.0, limit),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=style.SMALL_SIZE + 1,
        va="center",
        color=style.INK,
    )
    if len(stages) <= _LABELLED_STAGES:
        for place, height in zip(places, heights, strict=True):
            axes.annotate(
                f"{height:.1f}",
                (place, height),
                xytext=(0, 2),
                textcoords="offset points",
                fontsize=style.SMALL_SIZE,
                ha="center",
                color=style.INK,
            )
    axes.set(xlabel="pp rank", ylabel="peak memory (GB)", ylim=(0, 1.08 * top), xlim=(-0.6, len(stages) - 0.4))
    axes.set_xticks(list(places)[:: max(1, -(-len(stages) // _MARKED))])
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=style.TEXT_SIZE, reverse=False
    )
    style.save(figure, path)
