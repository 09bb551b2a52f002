"""A start from states in memory, and a stop before it makes another step."""

import contextlib
import io
import signal
from pathlib import Path

from tests.train.support import Run, manifest, train, train_rank
from threefold.checkpoint.folder import newest, path_of
from threefold.resilience.memory_copy import MemoryCopy
from threefold.train.attempt import Attempt, memory_files
from threefold.train.stop import Stopped
from threefold.verify.worker_pool import WorkerPool

Files = tuple[tuple[Path, ...], ...]


def started(run: Run, folder: Path, files: Files, asked: int = 0) -> Stopped | None:
    """Train as a rank of the pool, in a restart if a signal has asked for its end."""
    attempt = Attempt(number=int(bool(asked)), memory=files)
    with contextlib.redirect_stdout(io.StringIO()):
        return train(run.config, folder, "auto", asked=lambda: asked, attempt=attempt)


def tensors_of(folder: Path, step: int) -> list[bytes]:
    return [path.read_bytes() for path in sorted(path_of(folder, step).glob("*.bin"))]


def test_a_stop_before_the_first_step_saves_what_is_only_in_memory(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    settings = [("checkpoint.memory_every", 1), ("checkpoint.every", 3), ("checkpoint.keep", 0)]
    settings += [("precision.loss_scale", 2.0**6), ("precision.loss_scale_window", 2)]
    settings += [("train.spike_factor", 90.0), ("train.spike_window", 2)]
    run = small_run.but(dp=2, dtype="fp16", set=tuple(settings))
    files, folder = memory_files(2), tmp_path / "stopped"
    larger = run.but(steps=1, set=(*settings, ("train.global_batch_size", 12)))
    pool.run(2, train_rank, larger, tmp_path / "whole")
    pool.run(2, started, run, tmp_path / "whole", files)
    assert newest(folder) is None
    assert pool.run(2, started, run, folder, files, signal.SIGTERM) == [Stopped(signal.SIGTERM, 3)] * 2
    assert tensors_of(folder, 3) == tensors_of(tmp_path / "whole", 3) != []
    facts = manifest(path_of(folder, 3))
    assert facts["anomalies"] == manifest(path_of(tmp_path / "whole", 3))["anomalies"]
    assert len(facts["anomalies"]["recent"]) == 2
    assert (facts["loss_scale"], facts["good_steps"], facts["consumed_samples"]) == (2.0**7, 1, 12 + 8 + 8)
    written = path_of(folder, 3).stat().st_ino
    assert pool.run(2, started, run, folder, files, signal.SIGTERM) == [Stopped(signal.SIGTERM, 3)] * 2
    assert path_of(folder, 3).stat().st_ino == written, "a state that is saved was saved again"
    pool.run(2, train_rank, run, folder, True)
    assert tensors_of(folder, 4) == tensors_of(tmp_path / "whole", 4)


def test_of_two_states_the_older_one_is_replaced(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Another rank may have the newer one not yet."""
    files = memory_files(1)
    pool.run(1, started, small_run.but(set=(("checkpoint.memory_every", 1),)), tmp_path, files)
    assert sorted(MemoryCopy(file).step or 0 for file in files[0]) == [2, 3]
