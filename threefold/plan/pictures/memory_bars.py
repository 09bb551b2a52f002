"""The memory of each pipeline stage as stacked bars, by cause, under what a device has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from threefold.plan.pictures import style

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
"""Cause → colour, from the bottom up."""
_GB: Final = 10**9
_LABELLED: Final = 32
"""Bars up to which each has its sum above it."""
_MARKED: Final = 24
"""Ranks that have their numbers below them, at most."""


def draw_memory(path: Path, stages: Sequence[Mapping[str, int]], usable: int, title: str) -> None:
    """Draw the memory of each pipeline rank.

    Args:
        path: of the picture, .png or .svg.
        stages: of each rank, bytes by cause; causes that are not of `CAUSES` are not drawn.
        usable: bytes that a rank may use, drawn as a line.
        title: says whether it fits, as the picture does not say it otherwise.

    Raises:
        UserError: the picture cannot be written there.
    """
    style.check_picture(path)
    figure, axes = style.new_figure(min(16.0, max(7.0, 2.8 + 0.55 * len(stages))), 4.6, title)
    places = range(len(stages))
    heights = [0.0] * len(stages)
    for cause, color in CAUSES.items():
        values = [stage.get(cause, 0) / _GB for stage in stages]
        if any(values):
            axes.bar(places, values, width=0.78, bottom=heights, color=color, linewidth=0, label=cause)
            heights = [height + value for height, value in zip(heights, values, strict=True)]
    limit = usable / _GB
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
    if len(stages) <= _LABELLED:
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
