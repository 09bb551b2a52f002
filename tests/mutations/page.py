"""Writes the table of docs/mutations.md from the catalogue."""

import sys
from collections.abc import Iterable
from itertools import groupby

from tests.mutations.catalogue import DOES_NOT_APPLY, NOT_SEEN, ROOT, Mistake, catalogue

PAGE = ROOT / "docs" / "mutations.md"
BEGIN, END = "<!-- mutations: written by tests/mutations/page.py -->", "<!-- end of mutations -->"


def write_page() -> int:
    """Write the table; returns the exit status."""
    PAGE.write_text(_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def check_page() -> int:
    """Compare the table with the catalogue; returns the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    if _with_table(text) != text:
        print("docs/mutations.md does not show the catalogue as it is; run `make docs`", file=sys.stderr)
        return 1
    return 0


def _with_table(text: str) -> str:
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n{_tables(catalogue())}\n{text[end:]}"


def _tables(mistakes: Iterable[Mistake]) -> str:
    parts = []
    for subject, group in groupby(mistakes, lambda mistake: mistake.subject):
        parts += [
            f"\n### {subject.replace('-', ' ').capitalize()}\n",
            "| mistake | file | test | verify |",
            "|---|---|---|---|",
        ]
        parts += [_row(mistake) for mistake in group]
    return "\n".join([*parts, ""])


def _row(mistake: Mistake) -> str:
    test = f"`{mistake.test_file.removeprefix('tests/')}::{mistake.test_name}`"
    return f"| {mistake.says} | `{mistake.file.removeprefix('threefold/')}` | {test} | {_verify(mistake)} |"


def _verify(mistake: Mistake) -> str:
    for prefix, shown in ((DOES_NOT_APPLY, "–: "), (NOT_SEEN, "not seen: ")):
        if mistake.verify.startswith(prefix):
            return shown + mistake.verify.removeprefix(prefix)
    return f"`{mistake.verify}`".replace("|", "\\|")
