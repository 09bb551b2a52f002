"""Parametrize tests of which the quick run includes only some cases."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def sweep(names: str | Sequence[str], values: Iterable[Any], *, quick: Collection[int], **options: Any) -> Any:
    """Return `pytest.mark.parametrize` with all cases slow except those at the indices `quick`.

    Args:
        names: names of the parameters.
        values: values of the cases.
        quick: indices of the cases that `make test` runs; the others run with `make test-slow`. An index without a case
            is an error, so that a shorter list is noticed.
        options: further options of `parametrize`.
    """
    several = not isinstance(names, str) or "," in names
    cases = list(values)
    if not quick or not all(0 <= place < len(cases) for place in quick):
        raise ValueError(f"quick is {sorted(quick)} but there are the cases 0 to {len(cases) - 1}")
    marked = [case if place in quick else _slow(case, several) for place, case in enumerate(cases)]
    return pytest.mark.parametrize(names, marked, **options)


def _slow(case: Any, several: bool) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if several else (case,)), marks=pytest.mark.slow)
