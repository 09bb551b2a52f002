"""Figures of the package in one style, as wide as a page of documentation, and written as PNG or SVG."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from threefold.errors import UserError
from threefold.files import first_bytes, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES: Final = (".png", ".svg")
WIDTH: Final = 8.3
"""Width of a figure in inches. A README shows it in 830 pixels, where text of 9 points is 12 pixels high."""
DPI: Final = 200

# Colour-blind readers can tell these apart, and in print their lightness does.
BLUE, ORANGE, GREEN, PURPLE, RED, BROWN = "#3d6fb4", "#e8893c", "#55a868", "#8d6cb5", "#c44e52", "#937860"
YELLOW, CYAN = "#f2c14e", "#64b5cd"
INK, GREY, LINE, FAINT = "#262626", "#6b6b6b", "#b5b5b5", "#e9e9e9"
"""Colours of text; of text and lines beside the matter; of axes and grids; of empty space, such as waiting."""

TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 11.0, 9.0, 7.5
_LETTER, _LEADING = 0.6, 1.35
"""Approximate width of a letter and height of a line, as fractions of the font size."""
_EDGE: Final = 0.1
"""Distance of titles from the edges of a figure, in inches."""


def lighter(color: str, fraction: float) -> tuple[float, float, float]:
    """Mix a colour, as `#rrggbb`, with a fraction of white from 0 to 1."""
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part + (1 - part) * fraction for part in parts)
    return red, green, blue


def new_figure(height: float, title: str, subtitle: str = "") -> "tuple[Figure, Axes]":
    """Make a figure with one plot, `height` inches high without the titles, which are wrapped if they are too long."""
    from textwrap import fill

    # Not pyplot, which has global state and needs a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    texts = []
    for text, size, color in ((title, TITLE_SIZE, INK), (subtitle, TEXT_SIZE, GREY)):
        letters = int((WIDTH - 2 * _EDGE) * 72 / (_LETTER * size))
        if text:
            texts.append(("\n".join(fill(line, letters) for line in text.split("\n")), size, color))
    heights = [(text.count("\n") + 1) * size * _LEADING / 72 for text, size, _ in texts]
    whole = height + _EDGE + sum(heights)
    figure = Figure(figsize=(WIDTH, whole), layout="constrained", facecolor="white", dpi=DPI)
    FigureCanvasAgg(figure)
    top = whole - _EDGE
    for (text, size, color), each in zip(texts, heights, strict=True):
        figure.text(_EDGE / WIDTH, top / whole, text, fontsize=size, color=color, va="top", linespacing=_LEADING)
        top -= each
    figure.get_layout_engine().set(rect=(0, 0, 1, top / whole))  # type: ignore[union-attr, call-arg]
    axes = figure.add_subplot()
    axes.tick_params(labelsize=TEXT_SIZE, colors=INK, length=3)
    axes.xaxis.label.set(fontsize=TEXT_SIZE, color=INK)
    axes.yaxis.label.set(fontsize=TEXT_SIZE, color=INK)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(LINE)
    return figure, axes


def check_picture(path: Path) -> None:
    """Raise a `UserError` for a path that no picture can be written to, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"The picture {shown(path)} must end in .png or .svg; use {shown(path.with_suffix('.png'))}.")
    if not path.parent.is_dir():
        raise UserError(f"The picture {shown(path)} cannot be written: there is no folder {shown(path.parent)}.")
    if path.is_dir():
        raise UserError(f"The picture {shown(path)} cannot be written: that is a folder.")


_MARK: Final = "Threefold, with Matplotlib"


def require_picture(path: Path) -> None:
    """Raise a `UserError` as `check_picture`, or for an existing file that is not a picture of this program."""
    check_picture(path)
    begins = first_bytes(path, 4096)
    if begins and _MARK.encode() not in begins:
        raise UserError(f"The picture {shown(path)} exists already and is not of this program; use another name.")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG or SVG, by the suffix of its path; raise a `UserError` if it cannot be written."""
    check_picture(path)
    try:
        figure.savefig(path, dpi=DPI, metadata={"Creator" if path.suffix.lower() == ".svg" else "Software": _MARK})
    except OSError as error:
        raise UserError(f"The picture {shown(path)} cannot be written: {error.strerror or error}.") from None
