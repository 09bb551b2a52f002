"""Cases of a sweep that are not in the quick run are slow or for the sweep, and no case is lost."""

import pytest

from tests.support.sweep import sweep


def marks(mark: pytest.MarkDecorator) -> list[list[str]]:
    return [[each.name for each in getattr(case, "marks", ())] for case in mark.args[1]]


def test_the_cases_that_are_not_quick_are_slow() -> None:
    assert marks(sweep("x", "abc", quick=(1,))) == [["slow"], [], ["slow"]]
    assert marks(sweep(("x", "y"), [(1, 2), (3, 4)], quick=(0,))) == [[], ["slow"]]
    given = pytest.param(5, marks=pytest.mark.xfail, id="five")
    mark = sweep("x", [given, 6], quick=(1,))
    assert marks(mark) == [["xfail", "slow"], []]
    assert (mark.args[1][0].values, mark.args[1][0].id) == ((5,), "five")


def test_the_cases_that_are_neither_quick_nor_slow_are_for_the_sweep() -> None:
    assert marks(sweep("x", "abc", slow=(1,))) == [["sweep"], ["slow"], ["sweep"]]
    assert marks(sweep("x", "abcd", quick=(2,), slow=slice(0, None, 2))) == [["slow"], ["sweep"], [], ["sweep"]]


def test_a_place_without_a_case_is_an_error() -> None:
    with pytest.raises(ValueError, match="the cases 0 to 1"):
        sweep("x", [1, 2], quick=(2,))
    with pytest.raises(ValueError, match="the cases 0 to 1"):
        sweep("x", [1, 2], quick=(0,), slow=(2,))
    with pytest.raises(ValueError, match="quick is"):
        sweep("x", [1, 2], quick=(), slow=())
