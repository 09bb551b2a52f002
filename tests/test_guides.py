"""The guides in docs/guides: every block of Python, YAML and shell works as a reader would use it.

A block whose first line is a comment with a file name is saved under it; other Python is a script of its own; shell
blocks are run. All of a page is run in order, in one empty folder. Blocks of `text` are not run.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs/guides"
NAMED = re.compile(r"# ([\w./]+\.(?:py|yaml))$")


class Block(NamedTuple):
    """A block of a page; `line` is where its code begins."""

    language: str
    line: int
    code: str


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if start is None:
                start = number
            else:
                yield Block(lines[start][3:], start + 2, "\n".join(lines[start + 1 : number]) + "\n")
                start = None
    assert start is None, f"{page.name} has a block without an end, from line {(start or 0) + 1}"


def run_page(page: Path, folder: Path) -> int:
    """Use all blocks of a page in order; returns how many were run.

    Raises:
        AssertionError: a block failed.
    """
    ran = 0
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for block in blocks(page):
        named = NAMED.match(block.code.splitlines()[0])
        if block.language in ("python", "yaml") and named:
            (folder / named[1]).write_text(block.code)
            continue
        if block.language not in ("python", "sh"):
            assert block.language == "text", (
                f"{page.name}, line {block.line}: a {block.language!r} block without a name"
            )
            continue
        script = folder / f"block_{block.line}.{'py' if block.language == 'python' else 'sh'}"
        script.write_text(block.code)
        command = [sys.executable, str(script)] if block.language == "python" else ["bash", "-e", str(script)]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
        assert ended.returncode == 0, f"{page.name}, line {block.line}:\n{ended.stdout}\n{ended.stderr}"
        ran += 1
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(page.name for page in GUIDES.glob("*.md") if page.name != "README.md"))
def test_a_guide_runs(name: str, tmp_path: Path) -> None:
    assert run_page(GUIDES / name, tmp_path) > 0


@pytest.mark.slow
def test_the_readme_runs_with_the_model_of_the_guide_and_fewer_steps(tmp_path: Path) -> None:
    for block in blocks(GUIDES / "own_model.md"):
        if block.language == "python" and (named := NAMED.match(block.code.splitlines()[0])):
            (tmp_path / named[1]).write_text(block.code)
    text = (ROOT / "README.md").read_text()
    shorter = ("data: {path: tokens}\nmodel", "data: {path: tokens, sequence_length: 64}\nmodel")
    for many, few in (("max_steps: 1000", "max_steps: 2"), ("max_steps=2000", "max_steps=4"), shorter):
        assert text.count(many) == 1
        text = text.replace(many, few)
    (tmp_path / "README.md").write_text(text)
    assert run_page(tmp_path / "README.md", tmp_path) == 2


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n# mine.py\nx = 1\n```\n\n```sh\npython -c 'import mine; assert mine.x == 2'\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md, line 7"):
        run_page(page, tmp_path)


def test_every_guide_is_listed() -> None:
    listed = re.findall(r"\]\((\w+\.md)\)", (GUIDES / "README.md").read_text())
    assert sorted(set(listed)) == sorted({page.name for page in GUIDES.glob("*.md")} - {"README.md"})


def test_links_lead_somewhere() -> None:
    for page in [*GUIDES.glob("*.md"), ROOT / "docs/api.md", ROOT / "README.md"]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
