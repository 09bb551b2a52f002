"""Writes docs/capabilities.md from docs/capabilities.toml and the tests (`make docs`); `--check` only compares.

Ends with status 1 where a capability names no test, or one that does not exist.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "docs" / "capabilities.toml", ROOT / "docs" / "capabilities.md"

HEAD = """# Capabilities and the tests that prove them

Each row describes a capability of Threefold and lists the tests that prove it. `make test-slow` runs the tests marked
`(slow)`, and `make test-sweep` those marked `(sweep)`. `make test` runs the others, many of them only in some of their
cases. "Equal" means that losses, gradients of every parameter before the update, and weights after several steps differ
from those of one process with the unsplit model only by rounding: at most 10⁻⁵ in fp32 and 10⁻¹² in fp64. That the
tests detect mistakes is checked with the [catalog of mistakes](mutations.md), each of which a named test must find.
[Guarantees](guarantees.md) lists the promises about files, folders and errors.

<!-- written by docs/capabilities.py from docs/capabilities.toml -->
"""


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


def problems(sections: list[dict[str, Any]]) -> Iterator[str]:
    """A sentence for each capability without a test, and for each test that does not exist."""
    for section in sections:
        for capability in section["capability"]:
            if not capability["tests"]:
                yield f"no test is named for: {capability['what']}"
            for test in capability["tests"]:
                file, _, name = test.partition("::")
                if not tests_in(file) or (name and name not in tests_in(file)):
                    yield f"there is no {test}, named for: {capability['what']}"


def cell(test: str) -> str:
    """A test as the page names it."""
    file, _, name = test.partition("::")
    found = tests_in(file)
    marks = {found[name]} if name else set(found.values())
    mark = marks.pop() if len(marks) == 1 else ""
    return f"[`{test.removeprefix('tests/')}`](../{file})" + (f" ({mark})" if mark else "")


def page(sections: list[dict[str, Any]]) -> str:
    lines = [HEAD]
    for section in sections:
        lines += [f"## {section['name']}", "", "| Capability | Proved by |", "|---|---|"]
        for capability in section["capability"]:
            lines.append(f"| {capability['what']} | {'<br>'.join(map(cell, capability['tests']))} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write the page, or with `--check` end with status 1 where it is not current."""
    sections = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["section"]
    if found := list(problems(sections)):
        sys.exit("docs/capabilities.toml: " + "; ".join(found))
    if "--check" not in sys.argv:
        PAGE.write_text(page(sections), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page(sections):
        sys.exit("docs/capabilities.md does not show docs/capabilities.toml and the tests as they are; run `make docs`")


if __name__ == "__main__":
    main()
