"""Parametrize tests of which the quick and the slow run include only some cases."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def sweep(
    names: str | Sequence[str],
    values: Iterable[Any],
    *,
    quick: Collection[int] = (),
    slow: Collection[int] | slice = slice(None),
    **options: Any,
) -> Any:
    """Return `pytest.mark.parametrize` with marks that leave all cases to slower runs except those at `quick`.

    Args:
        names: names of the parameters.
        values: values of the cases.
        quick: indices of the cases that `make test` runs.
        slow: indices of the others that `make test-slow` runs, in which each value of the cases should be; the rest
            runs with `make test-sweep`.
        options: further options of `parametrize`.

    Raises:
        ValueError: an index has no case, so that a shorter list is noticed, or there are no indices.
    """
    several = not isinstance(names, str) or "," in names
    cases = list(values)
    picked = range(len(cases))[slow] if isinstance(slow, slice) else slow
    if not [*quick, *picked] or not all(0 <= place < len(cases) for place in [*quick, *picked]):
        raise ValueError(f"quick is {sorted(quick)} and slow {slow} but there are the cases 0 to {len(cases) - 1}")
    marked = [
        case if place in quick else _marked(case, "slow" if place in picked else "sweep", several)
        for place, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, marked, **options)


def _marked(case: Any, mark: str, several: bool) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, getattr(pytest.mark, mark)], id=case.id)
    return pytest.param(*(case if several else (case,)), marks=getattr(pytest.mark, mark))
