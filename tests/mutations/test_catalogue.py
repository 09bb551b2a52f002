"""The catalogue of mistakes fits the package as it is; that each is found, `make test-mutations` sees."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.parity_gpt.mistakes import IN_THREEFOLD, ROWS
from tests.mutations.catalogue import DOES_NOT_APPLY, NOT_SEEN, ROOT, Mistake, catalogue
from tests.mutations.page import tables
from tests.mutations.run import Copy, check_unchanged, judged

MISTAKES = catalogue()


def test_every_patch_applies() -> None:
    """A refactoring that moves the text of a mistake has to change its entry."""
    texts = {each.file: (ROOT / each.file).read_text(encoding="utf-8") for each in MISTAKES}
    counts = {each.name: texts[each.file].count(each.old) for each in MISTAKES}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    packages = ("threefold/", "parity/threefold_parity/")
    assert [each.name for each in MISTAKES if each.old == each.new or not each.file.startswith(packages)] == []


def test_every_patch_leaves_python_or_toml() -> None:
    for each in MISTAKES:
        text = (ROOT / each.file).read_text(encoding="utf-8").replace(each.old, each.new)
        tomllib.loads(text) if each.file.endswith(".toml") else compile(text, each.name, "exec")


def test_no_patch_names_what_is_gone(tmp_path: Path) -> None:
    """A mistake that raises a NameError is found by any test."""
    for each in MISTAKES:
        if each.file.endswith(".py"):
            text = (ROOT / each.file).read_text(encoding="utf-8").replace(each.old, each.new)
            (tmp_path / f"{each.name}.py").write_text(text, encoding="utf-8")
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select=F821",
        "--output-format=concise",
    ]
    assert subprocess.run([*ruff, "."], cwd=tmp_path, capture_output=True, text=True).stdout == "All checks passed!\n"


def test_every_entry_names_a_test_and_a_command_that_exist() -> None:
    assert len({each.name for each in MISTAKES}) == len(MISTAKES) >= 60
    lost = {
        each.name: each.test
        for each in MISTAKES
        if not (ROOT / each.test_file).is_file() or f"def {each.test_name}(" not in (ROOT / each.test_file).read_text()
    }
    assert lost == {}
    configs = {path.name for path in (Path(__file__).parent / "configs").iterdir()}
    assert {each.name: each.verify for each in MISTAKES if each.command and each.command[0] not in configs} == {}
    assert [each.name for each in MISTAKES if each.verify in (DOES_NOT_APPLY, NOT_SEEN)] == []


def test_mistakes_of_other_systems_are_entries() -> None:
    assert set(IN_THREEFOLD) <= {row.key for row in ROWS}
    assert set(IN_THREEFOLD.values()) <= {each.name for each in MISTAKES}


def test_the_page_shows_the_catalogue() -> None:
    rows = tables()
    assert [each.name for each in MISTAKES if f"\n| {each.says} | " not in rows] == []


def test_text_that_is_not_there_once_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\ntwo\n")
    entry = Mistake("name", "It says.", "subject", "a.py", "two", "three", "tests/a.py::test_a", "no: a reason")
    with pytest.raises(ValueError, match=r"`old` occurs 2 times in a\.py"):
        entry.put_into(tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\ntwo\ntwo\n"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    made = Copy(tmp_path_factory.mktemp("mutations"))
    yield made
    made.close()


@pytest.mark.sweep
def test_without_a_mistake_all_is_well(copy: Copy) -> None:
    assert check_unchanged(copy, MISTAKES, tests=True, verify=True) == []


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_mistake_is_found(copy: Copy, mistake: Mistake) -> None:
    verdict = judged(copy, mistake)
    assert verdict.test is not None
    assert verdict.test.caught, verdict.test.how
    assert verdict.verify is None or verdict.verify.caught, verdict.verify.how
