"""The generated parts of the site: each can be made from the sources, belongs to one page, and shows what it is for."""

import pytest

from docs import capabilities, generate


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
