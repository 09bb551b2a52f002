"""The page of the Python library: its examples use names and arguments that there are."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import threefold

PAGE = Path(__file__).parents[1] / "docs/api.md"
ALIASES = ("t3", "threefold")


def examples() -> list[tuple[str, str]]:
    """Each Python block of the page, with the heading that it stands under."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^(?=###+ )", PAGE.read_text(), flags=re.MULTILINE):
        heading = part.splitlines()[0].strip("# `")
        found += [(heading, block) for block in re.findall(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL)]
    return found


def dotted(node: ast.expr) -> str:
    """`t3.callbacks.EarlyStopping` of a call's function; empty where it is no name of the library."""
    text = ast.unparse(node)
    return text if text.split(".")[0] in ALIASES and re.fullmatch(r"[\w.]+", text) else ""


def looked_up(name: str) -> Any:
    found: Any = threefold
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def uses(code: str) -> Iterator[tuple[str, ast.Call | None]]:
    """The names of the library in a block, and the calls of them."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and dotted(node.func):
            yield dotted(node.func), node
        elif isinstance(node, ast.Attribute) and dotted(node):
            yield dotted(node), None


def test_most_names_have_an_example() -> None:
    assert len(examples()) > 30


@pytest.mark.parametrize(("heading", "code"), examples())
def test_an_example_fits_the_signatures(heading: str, code: str) -> None:
    for name, call in uses(code):
        found = looked_up(name)
        if call is None or any(isinstance(each, ast.Starred) for each in call.args):
            continue
        signature = inspect.signature(found)
        signature.bind(*call.args, **{each.arg: each.value for each in call.keywords if each.arg})


def test_every_public_name_has_an_entry() -> None:
    headings = re.findall(r"^### `threefold\.([\w.]+)`", PAGE.read_text(), re.MULTILINE)
    assert sorted({*threefold.__all__} - {*headings}) == ["callbacks"]
    assert len(headings) == len(set(headings))
