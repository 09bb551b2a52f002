"""The pool of local workers that distributed tests run on, and other fixtures of several folders."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.support.parity import Case, Trace, one_process
from tests.train.support import Run, write_tokens
from threefold.launch.worker_pool import WorkerPool

settings.register_profile("house", database=None, deadline=None, derandomize=True)
settings.load_profile("house")

_FLEET = pytest.StashKey[WorkerPool]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the pool before the first test: afterwards this process has run torch operations and cannot be forked."""
    if any("pool" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[_FLEET] = WorkerPool(8)


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[WorkerPool]:
    """Eight workers on which `pool.run(world_size, fn, *args)` calls `fn` as the ranks of a fresh process group."""
    with pytestconfig.stash[_FLEET] as fleet:
        yield fleet


@pytest.fixture(scope="session")
def expected(pool) -> Callable[[Case], Trace]:
    """What one process computes for a case; computed once for all its layouts."""
    known: dict[Case, Trace] = {}

    def trace(case: Case) -> Trace:
        if case.unsplit not in known:
            known[case.unsplit] = pool.run(1, one_process, case.unsplit)[0]
        return known[case.unsplit]

    return trace


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on one rank; `but` makes others of it."""
    from pydoc_data.topics import topics

    documents = [text[:400] for _, text in sorted(topics.items())][:60]
    return Run(write_tokens(tmp_path_factory.mktemp("data") / "tokens", documents))
