"""Exact runs of one process, made once for all files."""

from collections.abc import Callable

import pytest

from tests.support.exact import exact_run, with_layout
from tests.support.parity import Case, Trace
from threefold.verify.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def one_process(pool: WorkerPool) -> Callable[[Case], Trace]:
    """Return the trace of a case in one process."""
    known: dict[Case, Trace] = {}

    def trace(case: Case) -> Trace:
        alone = with_layout(case, 1, 1, 1)
        if alone not in known:
            known[alone] = pool.run(1, exact_run, alone)[0]
        return known[alone]

    return trace
