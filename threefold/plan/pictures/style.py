"""The common style of the pictures: colours, sizes of type, and how a figure is made and saved.

Figures are made without pyplot, which has global state and needs a display.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from threefold.errors import UserError
from threefold.files import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES: Final = (".png", ".svg")
DPI: Final = 150

# Told apart by people who see fewer colours too, and in print by lightness.
BLUE, ORANGE, GREEN, PURPLE, RED, BROWN = "#3d6fb4", "#e8893c", "#55a868", "#8d6cb5", "#c44e52", "#937860"
YELLOW, CYAN = "#f2c14e", "#64b5cd"
COLORS: Final = (BLUE, ORANGE, GREEN, PURPLE, RED, BROWN, YELLOW, CYAN)
"""In the order in which causes or series take them."""
INK, FAINT, LINE = "#262626", "#e9e9e9", "#b5b5b5"
"""Of text; of what is empty, such as waiting; of axes and grids."""

TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 12.0, 9.5, 7.0
_LETTER: Final = 0.1
"""Inches that a letter of a title takes, about."""
_MARGIN: Final = 1.0
"""Inches of a figure's width without a title."""


def lighter(color: str, share: float) -> tuple[float, float, float]:
    """A colour mixed with white.

    Args:
        color: as `#rrggbb`.
        share: of white, from 0 to 1.
    """
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part + (1 - part) * share for part in parts)
    return red, green, blue


def new_figure(width: float, height: float, title: str) -> "tuple[Figure, Axes]":
    """A figure of so many inches with one plot in the common style.

    Args:
        width, height: inches.
        title: one or two lines; the first says what is shown, with the number that matters most. Lines that are
            longer than the figure is wide are broken.
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
    """Refuse a path that no picture can be written to, before the work for it.

    Raises:
        UserError: the ending is not one of `SUFFIXES`, or there is no such folder.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"The picture {shown(path)} must end in .png or .svg; use {shown(path.with_suffix('.png'))}.")
    if not path.parent.is_dir():
        raise UserError(f"The picture {shown(path)} cannot be written: there is no folder {shown(path.parent)}.")
    if path.is_dir():
        raise UserError(f"The picture {shown(path)} cannot be written: that is a folder.")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG or SVG, by the ending of its path.

    Raises:
        UserError: it cannot be written there.
    """
    check_picture(path)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UserError(f"The picture {shown(path)} cannot be written: {error.strerror or error}.") from None
