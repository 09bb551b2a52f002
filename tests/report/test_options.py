"""Whole numbers as options of commands."""

import pytest

from threefold.errors import UserError
from threefold.report.options import whole_number


def test_whole_numbers() -> None:
    assert [whole_number(text, "--n", most=2000) for text in ("1", "1_024", " 7 ", "2000")] == [1, 1024, 7, 2000]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("2001", "--n 2001 must be at most 2,000; use 2000."),
        ("0", "--n 0 must be at least 1; use 1."),
        ("1e3", "--n 1e3 must be a whole number; use 1000."),
        ("1e9", "--n 1e9 must be a whole number; use 2000."),
        ("inf", "--n inf must be a whole number; use 1."),
        ("1,024", "--n 1,024 must be a whole number; use 1024."),
        ("", "--n '' must be a whole number; use 1."),
    ],
)
def test_other_numbers_are_refused_with_the_nearest(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as told:
        whole_number(text, "--n", most=2000)
    assert str(told.value) == sentence
