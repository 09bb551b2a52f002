"""What the parity tests share."""

from collections.abc import Callable

import pytest

from tests.support.parity import Case, Trace, one_process


@pytest.fixture(scope="session")
def expected(pool) -> Callable[[Case], Trace]:
    """What one process computes for a case; computed once for all its layouts."""
    known: dict[Case, Trace] = {}

    def trace(case: Case) -> Trace:
        if case.unsplit not in known:
            known[case.unsplit] = pool.run(1, one_process, case.unsplit)[0]
        return known[case.unsplit]

    return trace
