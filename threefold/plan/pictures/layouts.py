"""The layouts of a search as a picture: memory against throughput, the best labelled, the Pareto front visible."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from threefold.byte_sizes import format_bytes
from threefold.plan.pictures.style import BLUE, INK, LINE, ORANGE, RED, TEXT_SIZE, lighter, new_figure, save
from threefold.plan.search.costs import Evaluated
from threefold.plan.search.planning import SearchAnswer
from threefold.plan.search.points import points_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELLED: Final = 3
"""Of the best layouts, how many are told in words."""
_ROOM: Final = 1.3
"""Height of the picture for the fastest layout's, with room for the labels."""
_GB: Final = 1e9


def draw_layouts(planned: SearchAnswer, path: Path) -> None:
    """Draw the layouts that fit: memory of the rank with the most, and tokens per second.

    Args:
        planned: the answer to a request.
        path: of the picture, `.png` or `.svg`.

    Raises:
        UserError: it cannot be written there.
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
