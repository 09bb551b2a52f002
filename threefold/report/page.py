"""Pages of HTML that commands write."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError
from threefold.files import shown

_OF_A_PAGE: Final = re.compile(rb'<meta name="generator" content="threefold ')


def require_page(path: Path) -> None:
    """Raise a `UserError` unless a page can be written to the path of `--html`: over nothing but another such page."""
    named = f"--html {shown(path)}"
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "that is a folder" if path.is_dir() else f"there is no folder {shown(path.parent)}"
        raise UserError(f"{named} cannot be written: {what}.")
    if path.is_file():
        try:
            with path.open("rb") as file:
                begins = file.read(1000)
        except OSError as error:
            raise UserError(f"{named} cannot be read ({error.strerror}); use another name.") from None
        if begins and not _OF_A_PAGE.search(begins):
            raise UserError(f"{named} exists already and is not a page of this program; use another name.")


def fill_page(page: str, parts: Mapping[str, str]) -> str:
    """Replace each `{{name}}` of an HTML page by the part of that name, in which nothing is replaced."""
    first, *others = page.split("{{")
    pieces = [first]
    for other in others:
        name, rest = other.split("}}", 1)
        pieces += [parts[name], rest]
    return "".join(pieces)


def json_in_script(document: Mapping[str, Any]) -> str:
    """Return a document as JSON for a script element of a page, which only `<` could end; ASCII suits any file name."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", r"\u003c")
