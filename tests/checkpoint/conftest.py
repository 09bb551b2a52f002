"""A run with checkpoints of several layouts."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.support import Run, train_rank
from threefold.verify.worker_pool import WorkerPool


@pytest.fixture(scope="package")
def saved(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tp 2, resumed on dp 2 · pp 2 with ZeRO 1, with checkpoints after steps 2 and 4, which nobody changes."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    keep = (("checkpoint.every", 2), ("checkpoint.keep", 0))
    pool.run(2, train_rank, small_run.but(tp=2, steps=2, set=keep), folder)
    pool.run(4, train_rank, small_run.but(dp=2, pp=2, set=(*keep, ("parallel.zero", 1))), folder, True)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture(scope="package")
def trained(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after steps 1 to 4."""
    folder = tmp_path_factory.mktemp("trained")
    settings = (("checkpoint.every", 1), ("checkpoint.keep", 0))
    pool.run(2, train_rank, small_run.but(dp=2, set=settings), folder)
    return folder


@pytest.fixture(scope="session")  # one address for all: s3fs keeps its file systems, whose server must not change
def server() -> Iterator[str]:
    """The address of a server that speaks S3, on this machine."""
    pytest.importorskip("s3fs", reason="s3fs is not installed, so no S3 server is tested")
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed, so no S3 server is tested")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    try:
        running.start()
    except OSError as error:
        pytest.skip(f"no server can be started here ({error})")
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()
