"""Sizes in bytes, counts and numbers of times as text."""

import pytest

from threefold.files import counted, format_bytes, how_often, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (140_300, "140.3 kB"),
        (10**6, "1.0 MB"),
        (10**12, "1000.0 GB"),
    ],
)
def test_the_largest_unit_that_fits(count: int, text: str) -> None:
    assert format_bytes(count) == text
    if count >= 1000:
        assert parse_bytes(text) == count


def test_another_word_for_bytes() -> None:
    assert format_bytes(12, "B") == "12 B"


@pytest.mark.parametrize(
    ("text", "count"), [("500MB", 500 * 10**6), (" 1.5 gb ", 15 * 10**8), ("4096", 4096), ("0.1", 1), ("2kB", 2000)]
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "0GB", "-1MB", "5TB", "MB", "1e3", "5 G"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 500MB or 5GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("times", "text"),
    [
        *(
            (0, "0 times"),
            (0.01, "less than 0.1 times"),
            (0.05, "0.1 times"),
            (0.42, "0.4 times"),
            (0.949, "0.9 times"),
        ),
        *((0.951, "once"), (1, "once"), (1.04, "once"), (1.06, "1.1 times"), (2, "2 times"), (2.08, "2.1 times")),
        *((1200, "1,200 times"), (1234.56, "1,234.6 times")),
    ],
)
def test_numbers_of_times(times: float, text: str) -> None:
    assert how_often(times) == text


def test_counts_have_one_or_several_things() -> None:
    assert [counted(count, "rank") for count in (0, 1, 1024)] == ["0 ranks", "1 rank", "1,024 ranks"]
    assert counted(2, "batch", "es") == "2 batches"
