"""The generated parts of the site, each of which belongs to one page, and the files of a release."""

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

import threefold
from docs import api, capabilities, generate

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("name", "rows"), [("capabilities", 60), ("guarantees", 130)])
def test_every_row_names_tests_that_exist_and_is_in_its_table(name: str, rows: int) -> None:
    found = capabilities.sections(name)
    assert list(capabilities.problems(found)) == []
    page = capabilities.page(found)
    whats = [row["what"] for section in found for row in section["row"]]
    assert len(whats) >= rows
    assert [what for what in whats if f"\n| {what} | " not in page] == []


def test_a_row_without_a_test_or_with_one_that_is_not_there_is_a_problem() -> None:
    rows = [{"what": "This.", "tests": []}, {"what": "That.", "tests": ["tests/test_docs.py::test_nothing"]}]
    assert list(capabilities.problems([{"name": "Here", "row": rows}])) == [
        "no test is named for: This.",
        "there is no tests/test_docs.py::test_nothing, named for: That.",
    ]


def test_a_table_says_which_tests_make_test_leaves_out() -> None:
    assert capabilities.cell("tests/test_guides.py::test_the_python_of_another_page_runs").endswith(" (slow)")
    assert capabilities.cell("tests/test_guides.py::test_every_guide_is_listed").endswith(")")


def test_every_part_belongs_to_one_page() -> None:
    assert list(generate.problems()) == []


def test_a_page_keeps_no_generated_table() -> None:
    """What stands in its place says how a reader of the repository gets it."""
    for page in generate.DOCS.rglob("*.md"):
        if "_build" not in page.parts:
            for name, text in generate.MARK.findall(page.read_text(encoding="utf-8")):
                assert "make docs-site" in text, f"{page.name}: {name}"
                assert len(text.split()) < 100, f"{page.name}: {name}"


@pytest.mark.parametrize("name", ["commands", "rooms"])
def test_a_part_is_made(name: str) -> None:
    made = generate.PARTS[name]()
    wanted = {
        "commands": ["## `threefold train`", "### `threefold data prepare`", "--run-dir"],
        "rooms": ["| **train** |"],
    }
    assert [text for text in wanted[name] if text not in made] == []


RELEASE = runpy.run_path(str(ROOT / ".ci/release.py"))


def test_links_of_a_released_readme_are_absolute() -> None:
    text = RELEASE["absolute"]((ROOT / "README.md").read_text(), "https://host.example/me/threefold", "v1.2.3")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 40
    assert [link for link in links if not link.startswith("https://")] == []
    assert "](https://host.example/me/threefold/raw/v1.2.3/docs/proof.png)" in text
    assert "](https://host.example/me/threefold/blob/v1.2.3/docs/verify.md)" in text


def test_a_release_has_the_addresses_of_the_project() -> None:
    text = RELEASE["with_urls"]((ROOT / "pyproject.toml").read_text(), "https://host.example/me/threefold", "v1.2.3")
    urls = tomllib.loads(text)["project"]["urls"]
    assert urls["Homepage"] == "https://host.example/me/threefold"
    assert urls["Changelog"].endswith("/v1.2.3/CHANGELOG.md")


def test_a_tag_of_another_version_is_refused(tmp_path: Path) -> None:
    for name in ("threefold/__init__.py", "parity/threefold_parity/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = threefold.__version__
    assert RELEASE["problem"](tmp_path, "v9.9.9") == f"the tag is v9.9.9, but the package's version is {version}"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version}\n")
    assert RELEASE["problem"](tmp_path, f"v{version}") == ""
    (tmp_path / "CITATION.cff").write_text("version: 0.0.1\n")
    assert RELEASE["problem"](tmp_path, f"v{version}") == f"CITATION.cff does not have the version {version}"


def test_the_versions_of_python_agree() -> None:
    """The package's metadata, CI, and what the README, the page on installing and the container say."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    first, last = versions[0], versions[-1]
    after = f"3.{int(last.split('.')[1]) + 1}"
    assert project["requires-python"] == f">={first},<{after}"
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert ci["jobs"]["quick"]["strategy"]["matrix"]["python"] == versions
    assert f"python-{first}_to_{last}-blue" in (ROOT / "README.md").read_text()
    assert f"Python {', '.join(versions[:-1])} or {last}" in (ROOT / "docs/install.md").read_text()
    assert f"python:{first}" in (ROOT / "Dockerfile").read_text()


PAGES = [*(page for page in generate.DOCS.rglob("*.md") if "_build" not in page.parts), *ROOT.glob("*.md")]
ROOMS = "|".join(sorted(path.name for path in (ROOT / "threefold").iterdir() if path.is_dir()))
NAMED_FILE = re.compile(r"(?<![\w/.-])(?:threefold|tests|benchmarks|examples)/[\w/]+\.(?:py|toml|yaml|md)\b")
FILE_OF_A_ROOM = re.compile(rf"(?<![\w/.-])(?:{ROOMS})/[\w/]+\.py\b")
NAMED_MODULE = re.compile(r"`(threefold(?:\.[a-z]\w*)+)")


def lost_names(page: Path) -> list[str]:
    """Files and modules that a page names and that are not there."""
    text = page.read_text(encoding="utf-8")
    lost = [name for name in NAMED_FILE.findall(text) if not (ROOT / name).exists()]
    if page.name == "developing.md":
        names = FILE_OF_A_ROOM.findall(text)
        lost += [name for name in names if not (ROOT / "threefold" / name).exists() and not (ROOT / name).exists()]
    for name in NAMED_MODULE.findall(text):
        parts = name.split(".")
        path = ROOT.joinpath(*parts[:2])
        if parts[1] not in PUBLIC and not (path.is_dir() or path.with_suffix(".py").is_file()):
            lost.append(name)
        elif path.is_dir() and len(parts) > 3:
            inner = ROOT.joinpath(*parts[:3])
            if not (inner.is_dir() or inner.with_suffix(".py").is_file()):
                lost.append(name)
    return lost


PUBLIC = {*threefold.__all__, *(path.split(".")[0] for _, _, paths in api.GROUPS.values() for path in paths)}
PUBLIC |= {"model_families", "optimizers", "lr_schedules", "token_formats", "fault_policies"}
"""Public names, and groups of entry points."""


def test_files_and_modules_that_pages_name_are_there() -> None:
    assert {page.name: lost for page in PAGES if (lost := lost_names(page))} == {}


def test_a_file_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "developing.md"
    page.write_text("See `threefold/train/nothing.py`, `train/nothing.py` and `threefold.train.nothing.function`.")
    assert lost_names(page) == ["threefold/train/nothing.py", "train/nothing.py", "threefold.train.nothing.function"]
