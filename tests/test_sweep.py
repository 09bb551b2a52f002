"""Cases of a sweep that are not in the quick run are slow, and no case is lost."""

import pytest

from tests.support.sweep import sweep


def slow_cases(mark: pytest.MarkDecorator) -> list[bool]:
    return [any(each.name == "slow" for each in getattr(case, "marks", ())) for case in mark.args[1]]


def test_the_cases_that_are_not_quick_are_slow() -> None:
    assert slow_cases(sweep("x", "abc", quick=(1,))) == [True, False, True]
    assert slow_cases(sweep(("x", "y"), [(1, 2), (3, 4)], quick=(0,))) == [False, True]
    given = pytest.param(5, marks=pytest.mark.xfail, id="five")
    mark = sweep("x", [given, 6], quick=(1,))
    assert slow_cases(mark) == [True, False]
    case = mark.args[1][0]
    assert (case.values, case.id, [each.name for each in case.marks]) == ((5,), "five", ["xfail", "slow"])


def test_a_place_without_a_case_is_an_error() -> None:
    with pytest.raises(ValueError, match="the cases 0 to 1"):
        sweep("x", [1, 2], quick=(2,))
    with pytest.raises(ValueError, match="quick is"):
        sweep("x", [1, 2], quick=())
