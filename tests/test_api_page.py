"""The pages of the Python library: their examples run, and show what they say."""

import ast
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import threefold
from docs import api
from tests.train.support import Run
from threefold.verify.worker_pool import WorkerPool

ROOT = Path(__file__).parents[1]
PAGES = [(ROOT / "docs/api.md").read_text(), *(api.page(file) for file in api.GROUPS)]
ALIASES = ("t3", "threefold")
CODE = tomllib.loads(Path(__file__).with_name("api_scenes.toml").read_text())
SCENES = CODE["scenes"]


def examples() -> list[tuple[str, str]]:
    """Each Python block of the pages, with the heading that it stands under."""
    found: list[tuple[str, str]] = []
    for part in (part for page in PAGES for part in re.split(r"^(?=##+ )", page, flags=re.MULTILINE) if part):
        heading = part.splitlines()[0].strip("# `")
        found += [(heading, block) for block in re.findall(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL)]
    return found


def dotted(node: ast.expr) -> str:
    """`t3.callbacks.EarlyStopping` of a call's function; empty where it is not a name of the library."""
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


def checked(code: str) -> str:
    """An example in which each expression that a comment follows must have that value."""
    lines = code.splitlines()
    for node in ast.parse(code).body:
        shown = re.fullmatch(r"# (.*[^.])", lines[node.end_lineno]) if (node.end_lineno or 0) < len(lines) else None
        if isinstance(node, ast.Expr) and shown:
            value = ast.unparse(node.value)
            lines[node.lineno - 1] = f"assert repr(_ := ({value})) == {shown[1]!r}, _"
            lines[node.lineno : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno)
    return "\n".join(lines)


def with_parts(code: str) -> str:
    """Code in which a line `@part` stands for another part."""
    return re.sub(r"^@(\w+)$", lambda part: with_parts(CODE["parts"][part[1]]), code, flags=re.MULTILINE)


def script_of(heading: str, code: str) -> str:
    before, after = (with_parts(SCENES[heading].get(place, "")) for place in ("before", "after"))
    return f"EXAMPLES = {str(ROOT / 'examples')!r}\n{CODE['names']}\n{before}\n{checked(code)}\n{after}\n"


def run_as_a_rank(script: str, folder: Path) -> None:
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(script, "example", "exec"), {"__name__": "example"})
    finally:
        os.chdir(before)
        sys.path[:] = path


@pytest.fixture
def folder(small_run: Run, tmp_path: Path) -> Path:
    """With the config that the examples of runs name."""
    sections = small_run.but(dp=4).config.sections()
    train = {"global_batch_size": 256, "eval_batches": 1, "device": "cpu"}
    config = {"data": sections["data"], "model": sections["model"], "train": train, "parallel": {"dp": 4}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_every_example_runs_somewhere() -> None:
    assert sorted({heading for heading, _ in examples()}) == sorted(SCENES)
    assert len(examples()) == len(SCENES) > 30


@pytest.mark.parametrize(
    ("heading", "code"), [pytest.param(*each, id=each[0]) for each in examples() if SCENES[each[0]]["ranks"]]
)
def test_an_example_runs(pool: WorkerPool, folder: Path, heading: str, code: str) -> None:
    pool.run(SCENES[heading]["ranks"], run_as_a_rank, script_of(heading, code), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "code"), [pytest.param(*each, id=each[0]) for each in examples() if not SCENES[each[0]]["ranks"]]
)
def test_an_example_starts_its_ranks(folder: Path, heading: str, code: str) -> None:
    (folder / "example.py").write_text(script_of(heading, code))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "example.py"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr


def test_a_value_that_is_not_the_shown_one_is_noticed() -> None:
    with pytest.raises(AssertionError, match="3"):
        exec(checked("(\n    1 +\n    2\n)\n# 4\n"))
    exec(checked("1 + 2\n# 3\n"))


@pytest.mark.parametrize(("heading", "code"), examples())
def test_an_example_fits_the_signatures(heading: str, code: str) -> None:
    for name, call in uses(code):
        found = looked_up(name)
        if call is None or any(isinstance(each, ast.Starred) for each in call.args):
            continue
        signature = inspect.signature(found)
        signature.bind(*call.args, **{each.arg: each.value for each in call.keywords if each.arg})


def test_every_public_name_has_an_entry() -> None:
    assert list(api.problems()) == []
    text = "".join(PAGES)
    headings = re.findall(r"^## `threefold\.([\w.]+)`", text, re.MULTILINE)
    assert {*threefold.__all__} - {*headings} == {*threefold._ROOMS}
    assert len(headings) == len(set(headings))
