"""The notebook runs, and has no output stored; the page's example prints what it says."""

import ast
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import threefold as t3
from threefold.lesson.lesson import Lesson

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "lesson.ipynb"


def test_the_notebook_runs() -> None:
    """Each cell as a notebook runs it: its last expression is shown."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            body = ast.parse("".join(cell["source"])).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
            if last is not None:
                assert isinstance(last, ast.Expr)
                shown.append(eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names))
    lessons = [each for each in shown if isinstance(each, Lesson)]
    assert [each.layout for each in lessons] == ["tp2", "pp2", "cp2 ring", "dp2 zero3"]
    assert all(each.difference < 1e-12 for each in lessons)
    assert all("<table>" in each._repr_html_() for each in lessons)


def test_the_table_of_the_page_is_printed() -> None:
    page = (ROOT / "docs" / "lesson.md").read_text(encoding="utf-8")
    lesson = t3.explain({"model": {"num_layers": 2, "hidden_size": 8}}, layout="tp2")
    without_lines = partial(re.sub, r"\.py:\d+", ".py")
    assert without_lines(lesson.filter(module="blocks.0.mlp.*").table()) in without_lines(page)
