"""The pool of local workers that distributed tests run on, and other fixtures of several folders."""

import gc
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.browser import chromium as chromium
from tests.support.browser import page as page  # here, so that all tests share one browser
from tests.support.command import Command, Ended
from tests.support.modules import NEEDS, module_names
from threefold.cli import main

# Not torch: the process that hands the tests to others begins with this file, and they wait for it.
if TYPE_CHECKING:
    from tests.support.parity import Case, Trace
    from tests.train.support import Run
    from threefold.verify.worker_pool import WorkerPool

gc.disable()  # until all is imported: a collection looks at every object again and finds nothing to free
settings.register_profile("house", database=None, deadline=None, derandomize=True)
settings.load_profile("house")

_POOL = pytest.StashKey["WorkerPool"]()

LONGEST = (
    "test_guides.py",
    "parity/test_recording.py",
    "../parity/tests/test_frameworks.py",
    "../parity/tests/test_commands.py",
    "parallel/test_compiled.py",
    "cli/test_demo.py",
    "api/test_example_scripts.py",
    "parallel/test_parity.py",
    "parity/test_small_gpt.py",
    "exact/test_layouts.py",
    "verify/test_exact.py",
    "parallel/test_matrix.py",
    "planner/test_stage_memory.py",
    "planner/test_dry_run_stages.py",
    "parallel/pipeline/test_schedules.py",
)
"""Files that take longest, each for one worker: they begin first, so that none is left alone at the end."""


NO_GPU = "torch finds no GPU on this machine"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests of the mark `gpu` are skipped. Where several workers share the tests: the longest files
    first, then the others, those with most tests first."""
    from threefold.launch.device import gpu_count

    if not gpu_count():  # which initialises no CUDA, that the workers of the pool could not use then
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))
    first = {(Path(__file__).parent / name).resolve(): place for place, name in enumerate(LONGEST)}
    if gone := [str(path) for path in first if not path.exists()]:  # where one process runs the tests, too
        raise pytest.UsageError(f"LONGEST of tests/conftest.py names {', '.join(gone)}, which is not there.")
    if not hasattr(config, "workerinput"):
        return
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (first.get(item.path, len(first)), -count[item.path], item.path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests need a GPU that is not there."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} tests of the mark gpu were skipped: {NO_GPU}; with one, run `make test-gpu`.",
            yellow=True,
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the pool and the fork server of commands before the first test: afterwards this process has run torch
    operations and cannot be forked."""
    gc.freeze()
    gc.enable()
    pooled = any("pool" in getattr(item, "fixturenames", ()) for item in session.items)
    starts = "tests.support.ready" in sys.modules
    if pooled or starts:
        _import_for_workers()
    if starts:
        from tests.support.ready import fork_server

        fork_server()
    if pooled:  # after the server, which would hold its connections open
        from threefold.verify.worker_pool import WorkerPool

        session.config.stash[_POOL] = WorkerPool(8)
    if hasattr(session.config, "workerinput"):
        import torch

        torch.set_num_threads(1)  # others would wait for a core that another worker of the tests has


def _import_for_workers() -> None:
    """Import what runs import on their way: every worker is forked with it, as is each that replaces a failed one."""
    from threefold.launch.process import lasting_imports
    from threefold.report.tensorboard import import_writer

    with lasting_imports():  # so that no collection of a worker walks all that
        for name in module_names():
            if name not in NEEDS:  # no run imports it
                importlib.import_module(name)
        for name in ("matplotlib.figure", "matplotlib.backends.backend_agg", "torch._dynamo"):
            importlib.import_module(name)
        import_writer()


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator["WorkerPool"]:
    """Eight workers on which `pool.run(world_size, fn, *args)` calls `fn` as the ranks of a fresh process group."""
    with pytestconfig.stash[_POOL] as workers:
        yield workers


@pytest.fixture(scope="session")
def expected(pool) -> Callable[["Case"], "Trace"]:
    """What one process computes for a case; computed once for all its layouts."""
    from tests.support.parity import one_process

    known: dict[Case, Trace] = {}

    def trace(case: "Case") -> "Trace":
        if case.unsplit not in known:
            known[case.unsplit] = pool.run(1, one_process, case.unsplit)[0]
        return known[case.unsplit]

    return trace


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> "Run":
    """A run on one rank; `but` makes others of it."""
    from pydoc_data.topics import topics

    from tests.train.support import Run, write_tokens

    documents = [text[:400] for _, text in sorted(topics.items())][:60]
    return Run(write_tokens(tmp_path_factory.mktemp("data") / "tokens", documents))


@pytest.fixture
def threefold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call `threefold ARGUMENTS...` in this process; on a slow machine it prints no more than on a fast one."""
    monkeypatch.setattr("threefold.report.progress.QUIET", math.inf)

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
    from threefold.data.preparation import prepare

    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.jsonl"
    lines = [{"text": f"Document {n} says that {n * n} is the square of {n}."} for n in range(400)]
    text.write_text("\n".join(json.dumps(line) for line in lines))
    prepare((text,), folder / "tokens", vocab_size=300, workers=1)
    return folder / "tokens"
