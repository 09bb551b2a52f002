"""Writes the generated parts of the site into docs/_build/parts: python -m docs.generate (`make docs` runs it).

A page says where a part goes with `<!-- generated: NAME -->` and `<!-- end -->`; what stands between, which a reader of
the repository sees, is replaced by the part in the site (`docs/conf.py`). Ends with status 1 if something that a part
must have is missing: a capability's test, a public name, an argument's explanation.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from docs import api, capabilities, commands, compatibility, house
from tests.mutations.page import tables
from threefold.planner.reference import markdown

DOCS: Final = Path(__file__).parent
FOLDER: Final = DOCS / "_build" / "parts"
MARK: Final = re.compile(r"<!-- generated: ([\w/-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
PICTURE: Final = "rooms.svg"


def without_heading(text: str) -> str:
    """A page from its first paragraph on."""
    return text.partition("\n")[2].lstrip("\n")


def rooms() -> str:
    """The picture of the rooms, and their table."""
    path = f"_build/parts/{PICTURE}"
    edges = house.imports(house.rooms())
    return f"![Each room imports those below it that it has an arrow to]({path})\n\n{house.table(edges)}"


def traffic() -> str:
    """The collectives of a step, as a table."""
    rows = tomllib.loads((DOCS / "traffic.toml").read_text(encoding="utf-8"))["rows"]
    lines = ["| Axis | Content | Operation | Number | Bytes of each |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


PARTS: Final[dict[str, Callable[[], str]]] = {
    "config": lambda: without_heading(markdown()),
    "compatibility": lambda: without_heading(compatibility.markdown()),
    "capabilities": lambda: capabilities.page(capabilities.sections("capabilities")),
    "guarantees": lambda: capabilities.page(capabilities.sections("guarantees")),
    "mutations": tables,
    "commands": commands.page,
    "rooms": rooms,
    "traffic": traffic,
    "api": api.table,
    **{f"api/{file}": (lambda file=file: api.page(file)) for file in api.GROUPS},
}
"""Name of a part → the function that makes its text."""


def problems() -> Iterator[str]:
    """Yield a sentence for each thing that a part lacks, and for each part that no page has, or several have."""
    for name in ("capabilities", "guarantees"):
        yield from (f"docs/{name}.toml: {each}" for each in capabilities.problems(capabilities.sections(name)))
    yield from (f"docs/api.py: {each}" for each in api.problems())
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    named = [name for page in pages for name, _ in MARK.findall(page.read_text(encoding="utf-8"))]
    yield from (f"{named.count(name)} pages have the part {name}" for name in PARTS if named.count(name) != 1)
    yield from (f"docs/generate.py makes no part {name}" for name in named if name not in PARTS)


def main() -> None:
    """Write every part."""
    if found := list(problems()):
        sys.exit("; ".join(found))
    for name, made in PARTS.items():
        path = FOLDER / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made(), encoding="utf-8")
    picture = house.picture(house.reduced(house.imports(house.rooms())))
    (FOLDER / PICTURE).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
