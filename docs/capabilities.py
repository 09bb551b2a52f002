"""Tables of capabilities and of promises with the tests that show each, for the site (`docs/generate.py`).

`docs/capabilities.toml` and `docs/guarantees.toml` have the rows; which tests are slow is read from the tests.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs"


@cache
def tests_in(file: str) -> dict[str, str]:
    """The tests of a file by name, with the mark that all cases of it have: slow, sweep or none. Empty if there is no
    such file."""
    path = ROOT / file
    if not (file.startswith("tests/") and path.is_file()):
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_file = {ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)}
    return {
        node.name: _mark(of_file | {ast.unparse(each) for each in node.decorator_list})
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _mark(found: set[str]) -> str:
    if any(each.startswith("sweep(") and "quick=" not in each for each in found):  # see tests/support/sweep.py
        return "slow"
    return next((mark for mark in ("sweep", "slow") if f"pytest.mark.{mark}" in found), "")


def sections(name: str) -> list[dict[str, Any]]:
    """The sections of docs/NAME.toml: each has a `name` and rows, which have `what` and `tests`."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))["section"]  # type: ignore[no-any-return]


def problems(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each row without a test, and for each test that does not exist."""
    for row in (row for section in found for row in section["row"]):
        if not row["tests"]:
            yield f"no test is named for: {row['what']}"
        for test in row["tests"]:
            file, _, name = test.partition("::")
            if not tests_in(file) or (name and name not in tests_in(file)):
                yield f"there is no {test}, named for: {row['what']}"


def cell(test: str) -> str:
    """A test as the page names it."""
    file, _, name = test.partition("::")
    found = tests_in(file)
    marks = {found[name]} if name else set(found.values())
    mark = marks.pop() if len(marks) == 1 else ""
    return f"[`{test.removeprefix('tests/')}`](../{file})" + (f" ({mark})" if mark else "")


def page(found: list[dict[str, Any]]) -> str:
    """A table for each section."""
    lines = []
    for section in found:
        lines += [f"## {section['name']}", "", "| | Shown by |", "|---|---|"]
        for row in section["row"]:
            lines.append(f"| {row['what']} | {'<br>'.join([*map(cell, row['tests']), *row.get('also', ())])} |")
        lines.append("")
    return "\n".join(lines)
