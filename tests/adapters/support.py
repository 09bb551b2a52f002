"""What the tests of adapters share: a case with adapters."""

from dataclasses import replace

from tests.support.parity import Case

RANK, ALPHA = 3, 7.0


def with_adapter(case: Case, **settings: object) -> Case:
    given = {"rank": RANK, "alpha": ALPHA, **settings}
    return replace(case, update=tuple((f"adapter.{key}", value) for key, value in given.items()))
