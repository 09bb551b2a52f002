"""Bytes, operations and collectives of fourteen layouts are those that were kept: a change of sharding is a diff."""

from tests.support.golden_dry_runs import FILE, NAMES, read, table
from tests.support.sweep import sweep


@sweep("name", NAMES, quick=(4, 8))
def test_a_layout_needs_what_the_table_says(name: str) -> None:
    assert table(name) == read()[name], "python -m tests.support.golden_dry_runs writes the tables anew"


def test_the_file_holds_these_layouts_and_no_others() -> None:
    assert tuple(read()) == NAMES
    assert all(sum(line.startswith("rank ") for line in lines) >= 1 for lines in read().values())
    assert FILE.stat().st_size < 50_000
