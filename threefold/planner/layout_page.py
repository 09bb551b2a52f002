"""The page of `threefold show`: one HTML file with its document, style and script inside, which loads nothing."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from threefold.files import fill_page, json_in_script

_PARTS: Final = files("threefold.planner") / "page"
_SCRIPTS: Final = ("common.js", "layout.js", "tabs.js")
_MARK: Final = '<meta name="generator" content="threefold show">'


def layout_page(document: Mapping[str, Any]) -> str:
    """Return the page of a document, as `planner.layout_document` makes it."""
    parts = {
        "style": _part("layout.css"),
        "script": "\n".join(_part(name) for name in _SCRIPTS),
        "document": json_in_script(document),
    }
    return fill_page(_part("layout.html"), parts)


def is_layout_page(path: Path) -> bool:
    """Return whether a file is a page that `layout_page` made."""
    try:
        with path.open("rb") as file:
            return _MARK.encode() in file.read(1000)
    except OSError:
        return False


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")
