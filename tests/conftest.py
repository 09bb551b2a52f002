"""The pool of local workers that distributed tests run on, and other fixtures of several folders."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.command import Command, Ended
from tests.support.parity import Case, Trace, one_process
from tests.train.support import Run, write_tokens
from threefold.cli import main
from threefold.launch.worker_pool import WorkerPool

settings.register_profile("house", database=None, deadline=None, derandomize=True)
settings.load_profile("house")

_POOL = pytest.StashKey[WorkerPool]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the pool before the first test: afterwards this process has run torch operations and cannot be forked."""
    if any("pool" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[_POOL] = WorkerPool(8)


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[WorkerPool]:
    """Eight workers on which `pool.run(world_size, fn, *args)` calls `fn` as the ranks of a fresh process group."""
    with pytestconfig.stash[_POOL] as workers:
        yield workers


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


@pytest.fixture
def threefold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call `threefold ARGUMENTS...` in this process."""

    def call(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["threefold", *map(str, arguments)])
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # as in the script
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        return Ended(status, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of a few hundred short documents with a vocabulary of at most 300."""
    from threefold.data.prepare.preparation import PrepareRequest, prepare

    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.jsonl"
    lines = [{"text": f"Document {n} says that {n * n} is the square of {n}."} for n in range(400)]
    text.write_text("\n".join(json.dumps(line) for line in lines))
    prepare(PrepareRequest((text,), folder / "tokens", vocab_size=300, workers=1), _Quiet())
    return folder / "tokens"


class _Quiet:
    """No progress bar."""

    def phase(self, name: str, total_bytes: int) -> None:
        pass

    def advance(self, read_bytes: int) -> None:
        pass
