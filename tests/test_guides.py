"""The guides in docs/guides: every block of Python, YAML and shell works as a reader would use it.

A block whose first line is a comment with a file name is saved under it; other Python is a script of its own; shell
blocks are run. All of a page is run in order, in one empty folder. Blocks of `text` are not run.

Of the other pages the blocks of Python run, in a folder with tokens and a run; one after a comment `not run: …`, which
says why, does not. The examples of docs/api are run by test_api_page.py.
"""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.support.sweep import sweep

ROOT = Path(__file__).parents[1]
GUIDES, API = ROOT / "docs/guides", ROOT / "docs/api"
NOT_RUN = re.compile(r"<!-- not run: (.+) -->$")
NAMED = re.compile(r"# ([\w./]+\.(?:py|yaml))$")


class Block(NamedTuple):
    """A block of a page; `line` is where its code begins, `not_run` why it is not run."""

    language: str
    line: int
    code: str
    not_run: str = ""


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if start is None:
                start = number
            else:
                reason = NOT_RUN.match(lines[start - 1]) if start else None
                code = "\n".join(lines[start + 1 : number]) + "\n"
                yield Block(lines[start][3:], start + 2, code, reason[1] if reason else "")
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
        run_block(page, block, folder, environment)
        ran += 1
    return ran


def run_block(page: Path, block: Block, folder: Path, environment: dict[str, str]) -> None:
    script = folder / f"block_{block.line}.{'py' if block.language == 'python' else 'sh'}"
    script.write_text(block.code)
    command = [sys.executable, str(script)] if block.language == "python" else ["bash", "-e", str(script)]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, f"{page.name}, line {block.line}:\n{ended.stdout}\n{ended.stderr}"


def all_pages() -> list[Path]:
    """The pages of the repository; those that the site has been made of are not."""
    return [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]


def other_pages() -> list[str]:
    """The pages beside the guides that have Python, but the one of the library."""
    pages = [page for page in all_pages() if page.parent not in (GUIDES, API) and page.name != "api.md"]
    found = [page for page in pages if any(block.language == "python" for block in blocks(page))]
    return sorted(str(page.relative_to(ROOT)) for page in found)


@pytest.fixture(scope="module")
def run_of_readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader of the pages has it: `tokens` of text, and a run of a hundred steps."""
    folder = tmp_path_factory.mktemp("reader")
    config = """data: {path: tokens, sequence_length: 32, split: "949,50,1"}
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2}
train: {max_steps: 100, global_batch_size: 2, eval_every: 0}
checkpoint: {every: 100}
"""
    commands = """threefold data sample text
threefold data prepare text --out tokens
threefold train reader.yaml --run-dir runs/demo
"""
    (folder / "reader.yaml").write_text(config)
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    run_block(Path("a reader's folder"), Block("sh", 1, commands), folder, environment)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", other_pages())
def test_the_python_of_another_page_runs(name: str, run_of_readers: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for block in blocks(ROOT / name):
        if block.language == "python" and not block.not_run:
            named = NAMED.match(block.code.splitlines()[0])
            code = block.code.replace('"RUN/', '"runs/demo/')
            run_block(ROOT / name, block._replace(code=code), run_of_readers, environment)
            if named:
                (run_of_readers / named[1]).write_text(code)


def test_what_is_not_run_says_why() -> None:
    reasons = {(name, block.line): block.not_run for name in other_pages() for block in blocks(ROOT / name)}
    assert len([reason for reason in reasons.values() if reason]) == 3
    for page in all_pages():
        marked = sum(bool(block.not_run) for block in blocks(page))
        assert page.read_text().count("<!-- not run:") == marked, f"{page.name}: a reason is not before a block"


PAGES = sorted(page.name for page in GUIDES.glob("*.md") if page.name != "README.md")
LONG = ("a_run.md", "characters.md", "loss_differs.md", "slow_run.md")
"""Guides whose commands are also in other guides, and in the tests of the profile."""


@sweep("name", PAGES, slow=[place for place, name in enumerate(PAGES) if name not in LONG])
def test_a_guide_runs(name: str, tmp_path: Path) -> None:
    assert run_page(GUIDES / name, tmp_path) > 0


@pytest.mark.sweep
def test_the_guide_of_parity_runs(tmp_path: Path) -> None:
    assert run_page(ROOT / "parity/README.md", tmp_path) == 4


def script_of(folder: Path, name: str) -> dict[str, Any]:
    """The names of a script of a guide; what it imports from its folder is forgotten again."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        return runpy.run_path(str(folder / name))
    finally:
        sys.path.remove(str(folder))
        for module in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[module], "__file__", "")):
                del sys.modules[module]


def of_the_fleet_page(folder: Path, dp: int, tp: int, pp: int) -> list[dict[str, Any]]:
    """Train as the page does; the initial weights, the gradients of each step, and the weights at the end."""
    from tests.support.parity import whole_tensors

    script = script_of(folder, "train.py")
    model, optimizer, scheduler, loader = script["make"](dp, tp, pp)
    parts = model.gradient_step
    seen: Any = SimpleNamespace(optimizer=optimizer, mesh=model.mesh, model=parts.model, parallelism=parts.parallelism)
    found = [whole_tensors(seen, "master")]
    for batch in loader:
        model.train_batch(batch, script["loss_fn"])
        found.append(whole_tensors(seen, "gradient"))
        optimizer.step()
        scheduler.step()
    found.append(whole_tensors(seen, "master"))
    return [{name: tensor.clone() for name, tensor in each.items()} for each in found]


def plain_fleet_page(folder: Path, initial: dict[str, Any]) -> list[dict[str, Any]]:
    """The same model, data and updates in plain PyTorch, from the given weights."""
    import torch
    from torch import nn

    script = script_of(folder, "model.py")
    net = nn.Sequential(*(make() for make in script["layers"])).double()
    net[5].weight = net[0].weight
    net.load_state_dict({**initial, "5.weight": initial["0.weight"]})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    tokens, found = script["Tokens"](), []
    for step in range(3):
        x, y = (torch.stack(each) for each in zip(*(tokens[8 * step + row] for row in range(8)), strict=True))
        nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        found.append({name: each.grad.clone() for name, each in net.named_parameters()})
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [*found, {name: each.detach() for name, each in net.named_parameters()}]


@sweep("layout", [(1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1)], quick=[0])
def test_the_gradients_of_fleets_page_are_those_of_plain_pytorch(pool: Any, layout: Any, tmp_path: Path) -> None:
    for block in blocks(GUIDES / "from_fleet.md"):
        if block.language == "python" and (named := NAMED.match(block.code.splitlines()[0])):
            (tmp_path / named[1]).write_text(block.code)
    ranks = pool.run(4, of_the_fleet_page, tmp_path, *layout)
    joined = [{name: value for rank in ranks for name, value in rank[step].items()} for step in range(5)]
    expected = plain_fleet_page(tmp_path, joined[0])
    for ours, theirs in zip(joined[1:], expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert float((ours[name] - value).abs().max()) <= 1e-12 * float(value.abs().max()), name


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
    for page in [*all_pages(), *ROOT.glob("*.md"), ROOT / "benchmarks/RESULTS.md"]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
