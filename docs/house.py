"""Table and picture of the package's rooms, from its imports; `docs/generate.py` writes them into the site.

The floors are those that import-linter enforces (`[tool.importlinter]` in pyproject.toml), what a room is for is the
first paragraph of its docstring, and an arrow is an import that no longer path implies.
"""

import ast
import tomllib
from itertools import chain, pairwise
from pathlib import Path
from statistics import mean

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = "threefold"


def rooms() -> list[str]:
    """The rooms from the top floor down, as import-linter's contracts order them: attached ones, then the core."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    core, attached = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [room.strip() for floor in [*attached, *core] for room in floor.split("|")]


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


def table(edges: dict[str, list[str]]) -> str:
    """The rooms, what each is for, and what it imports, as a table of Markdown."""
    lines = ["| room | what it is for | imports |", "|---|---|---|"]
    for name in edges:
        lines.append(f"| **{short(name)}** | {purpose(name)} | {', '.join(map(short, edges[name]))} |")
        lines += [f"| {short(child)} | {purpose(child)} | |" for child in sub_rooms(name)]
    return "\n".join(lines) + "\n"


FLOOR, HEIGHT, GAP, BEND = 52, 26, 14, 18
"""Distance of floors, height of a room, smallest gap between neighbours on a floor, and bend of arrows, in px."""
Node = str | tuple[str, str, int]
"""A room, or the point where an arrow from a room to another passes a floor."""


def width(node: Node) -> int:
    return 20 + 8 * len(short(node)) if isinstance(node, str) else 0


def picture(edges: dict[str, list[str]]) -> str:
    """The rooms as SVG, each on a floor below all that import it, with arrows that pass between rooms."""
    floors = dict.fromkeys(edges, 0)
    for room, targets in edges.items():
        floors |= {target: max(floors[target], floors[room] + 1) for target in targets}
    for room in edges.keys() - set(chain(*edges.values())):
        floors[room] = min(floors[target] for target in edges[room]) - 1
    paths: list[list[Node]] = []
    nodes: list[list[Node]] = [[] for _ in range(max(floors.values()) + 1)]
    for room, targets in edges.items():
        nodes[floors[room]].append(room)
        for target in targets:
            between: list[Node] = [(room, target, floor) for floor in range(floors[room] + 1, floors[target])]
            for floor, node in enumerate(between, floors[room] + 1):
                nodes[floor].append(node)
            paths.append([room, *between, target])
    x = placed(nodes, paths)
    left = min(x[node] - width(node) / 2 for node in x) - GAP
    size = max(x[node] + width(node) / 2 for node in x) + GAP - left, FLOOR * len(nodes)
    y = {node: FLOOR * floor + FLOOR // 2 for floor, row in enumerate(nodes) for node in row}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]}" width="{size[0]:.0f}" '
        'role="img" font-family="system-ui, sans-serif" font-size="13" text-anchor="middle">',
        "<title>Rooms of the package</title>",
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 1 8 4 0 7z" fill="#7d8899"/></marker>',
        '<g fill="none" stroke="#7d8899" stroke-width="1.2">',
    ]
    for path in paths:
        points = [(x[node] - left, y[node]) for node in path]
        points[0], points[-1] = (points[0][0], points[0][1] + HEIGHT // 2), (points[-1][0], points[-1][1] - HEIGHT // 2)
        curve = f"M{points[0][0]:.0f} {points[0][1]}"
        for (x0, y0), (x1, y1) in pairwise(points):
            curve += f"C{x0:.0f} {y0 + BEND} {x1:.0f} {y1 - BEND} {x1:.0f} {y1}"
        lines.append(f'<path d="{curve}" marker-end="url(#head)"/>')
    lines += ["</g>", '<g fill="#eaf1fb" stroke="#4a78b5">']
    for room in edges:
        corner = x[room] - left - width(room) / 2, y[room] - HEIGHT / 2
        lines.append(
            f'<rect x="{corner[0]:.0f}" y="{corner[1]:.0f}" width="{width(room)}" height="{HEIGHT}" rx="5"/>'
            f'<text x="{x[room] - left:.0f}" y="{y[room] + 5}" fill="#1c2b41" stroke="none">{short(room)}</text>'
        )
    return "\n".join([*lines, "</g>", "</svg>", ""])


def placed(nodes: list[list[Node]], paths: list[list[Node]]) -> dict[Node, float]:
    """Return the x of each node, near the mean of those it is connected to; sorts each floor by it."""
    beside: dict[Node, list[Node]] = {node: [] for row in nodes for node in row}
    for path in paths:
        for upper, lower in pairwise(path):
            beside[upper].append(lower)
            beside[lower].append(upper)
    x = {node: 60.0 * place for row in nodes for place, node in enumerate(row)}
    for turn in range(200):
        for row in nodes if turn % 2 else reversed(nodes):
            wanted = {node: mean(x[other] for other in beside[node]) for node in row}
            if turn < 150:
                row.sort(key=lambda node: wanted[node])
            x |= spread(row, wanted)
    return x


def spread(row: list[Node], wanted: dict[Node, float]) -> dict[Node, float]:
    """Return the x of the nodes of a floor as close to the wanted ones as their widths and order allow."""
    offsets = [0.0]
    for before, node in pairwise(row):
        offsets.append(offsets[-1] + (width(before) + width(node)) / 2 + GAP)
    groups: list[list[float]] = []
    for node, offset in zip(row, offsets, strict=True):
        groups.append([wanted[node] - offset])
        while len(groups) > 1 and mean(groups[-2]) > mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    found = [mean(group) for group in groups for _ in group]
    return {node: start + offset for node, start, offset in zip(row, found, offsets, strict=True)}
