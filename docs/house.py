"""Draws the rooms of the package from its imports into docs/developing.md (`make docs`); `--check` only compares.

The floors are those that import-linter enforces (`[tool.importlinter]` in pyproject.toml), what a room is for is the
first paragraph of its docstring, and an arrow is an import that no longer path implies.
"""

import ast
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "developing.md"
PACKAGE = "threefold"
BEGIN, END = "<!-- house: written by docs/house.py -->", "<!-- end of house -->"


def rooms() -> list[str]:
    """The rooms from the top floor down, as import-linter's contract orders them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [room.strip() for floor in layers for room in floor.split("|")]


def imports(names: list[str]) -> dict[str, list[str]]:
    """Return, by room, the rooms that it imports, from the top; the import contract forbids higher ones."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    for name in names:
        if graph.find_children(name):
            graph.squash_module(name)
    below = {name: names[floor + 1 :] for floor, name in enumerate(names)}
    found = {name: graph.find_modules_directly_imported_by(name) for name in names}
    return {name: [room for room in below[name] if room in found[name]] for name in names}


def purpose(name: str) -> str:
    """The first paragraph of a room's docstring."""
    path = ROOT.joinpath(*name.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def short(name: str) -> str:
    return name.removeprefix(PACKAGE + ".").replace(".", "/")


def sub_rooms(name: str) -> list[str]:
    path = ROOT.joinpath(*name.split("."))
    return [f"{name}.{child.parent.name}" for child in sorted(path.glob("*/__init__.py"))]


def reduced(edges: dict[str, list[str]]) -> dict[str, list[str]]:
    """The edges that no longer path implies, so that the picture stays readable."""

    def reaches(start: str, goal: str) -> bool:
        return any(step == goal or reaches(step, goal) for step in edges[start])

    return {
        room: [target for target in targets if not any(other != target and reaches(other, target) for other in targets)]
        for room, targets in edges.items()
    }


def drawn() -> str:
    names = rooms()
    edges = imports(names)
    lines = ["| room | what it is for | imports |", "|---|---|---|"]
    for name in names:
        lines.append(f"| **{short(name)}** | {purpose(name)} | {', '.join(map(short, edges[name]))} |")
        lines += [f"| {short(child)} | {purpose(child)} | |" for child in sub_rooms(name)]
    picture = ["```mermaid", "flowchart TD"]
    for room, targets in reduced(edges).items():
        picture += [f"    {short(room)} --> {short(target)}" for target in targets]
    return "\n".join([*picture, "```", "", *lines])


def main() -> None:
    """Write the page, or with `--check` end with status 1 where it is not current."""
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    current = f"{text[:start]}\n{drawn()}\n{text[end:]}"
    if "--check" not in sys.argv:
        PAGE.write_text(current)
    elif current != text:
        sys.exit("docs/developing.md does not show the house as it is; run `make docs`")


if __name__ == "__main__":
    main()
