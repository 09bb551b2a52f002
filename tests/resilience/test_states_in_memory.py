"""A rank's state in memory: what it gives back, that half of one never counts, and starts from it."""

import contextlib
import io
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.support import Run, manifest, train, train_rank
from threefold.checkpoint.folder import newest, path_of
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.resilience.restarts import memory_files
from threefold.resilience.states_in_memory import StateInMemory, StatesInMemory
from threefold.train.attempt import Attempt
from threefold.train.stop import Stopped
from threefold.verify.worker_pool import WorkerPool


@pytest.fixture
def file() -> Path:
    ((file, _),) = memory_files(1)
    return file


def state(step: int) -> dict[str, Tensor]:
    """Tensors of several kinds, all of whose values follow from the step."""
    return {
        "weight": torch.full((3, 5), float(step)),
        "odd": torch.full((7,), step % 100, dtype=torch.uint8),
        "half": torch.full((2, 1), float(step), dtype=torch.bfloat16).t(),
        "scalar": torch.tensor(step),
        "nothing": torch.empty(0, 4),
    }


def empty() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}


def test_another_process_finds_what_was_written(file: Path) -> None:
    StateInMemory(file).write(7, state(7), {"layout": "x"})
    found, tensors = StateInMemory(file), empty()
    assert (found.step, found.is_whole(), found.facts()) == (7, True, {"layout": "x"})
    assert found.read(tensors) == set(tensors)
    for name, tensor in state(7).items():
        assert torch.equal(tensors[name], tensor)


def test_an_empty_file_holds_none(file: Path) -> None:
    copy = StateInMemory(file)
    assert (copy.step, copy.is_whole()) == (None, False)
    copy.discard()
    copy.write(3, state(3), {})
    copy.discard()
    assert (copy.step, copy.is_whole()) == (None, False)


def test_a_larger_state_replaces_a_smaller_one(file: Path) -> None:
    copy = StateInMemory(file)
    copy.write(1, {"weight": torch.zeros(2)}, {})
    copy.write(2, {"weight": torch.arange(100_000.0)}, {"more": "x" * 100})
    tensors = {"weight": torch.zeros(100_000)}
    found = StateInMemory(file)
    assert (found.step, found.is_whole()) == (2, True)
    found.read(tensors)
    assert torch.equal(tensors["weight"], torch.arange(100_000.0))


def test_every_flipped_bit_is_found(file: Path) -> None:
    StateInMemory(file).write(9, state(9), {"layout": "x"})
    descriptor = os.open(file, os.O_RDWR)
    size = os.fstat(descriptor).st_size
    for place in (*range(0, 72, 7), *range(4096, size, 13)):
        (before,) = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([before ^ 1]), place)
        assert not StateInMemory(file).is_whole(), place
        os.pwrite(descriptor, bytes([before]), place)
    assert StateInMemory(file).is_whole()
    os.close(descriptor)


def test_a_state_of_another_shape_is_refused(file: Path) -> None:
    copy = StateInMemory(file)
    copy.write(1, state(1), {})
    with pytest.raises(ValueError, match=r"weight of shape \[3, 5\]"):
        copy.read({**empty(), "weight": torch.zeros(5, 3)})


class Deadly(dict[str, Tensor]):
    """A state of which a process that writes it has copied `left` tensors when it is killed."""

    def __init__(self, tensors: dict[str, Tensor], left: int) -> None:
        super().__init__(tensors)
        self.left, self.rounds = left, 0

    def items(self) -> Any:
        self.rounds += 1
        for number, item in enumerate(super().items()):
            if self.rounds == 2 and number == self.left:  # the second time, when they are copied
                os.kill(os.getpid(), signal.SIGKILL)
            yield item
        if self.rounds == 2 and self.left == len(self):
            os.kill(os.getpid(), signal.SIGKILL)


def _write_and_die(file: Path, left: int) -> None:
    torch.set_num_threads(1)  # or a fork of a process that has computed in parallel could hang
    StateInMemory(file).write(8, Deadly(state(8), left), {})


@pytest.mark.parametrize("left", range(6))
def test_a_kill_while_it_is_written_leaves_none(file: Path, left: int) -> None:
    StateInMemory(file).write(6, state(6), {})
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(file, left))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not StateInMemory(file).is_whole()
    assert StateInMemory(file).step is None


def newest_kept(run: Run, written: Run, files: Any, steps: tuple[tuple[int, ...], ...]) -> int | None:
    """The newest state that counts, where each rank's files hold these steps, written in another run's layout."""
    mesh = Mesh(Layout.from_config(run.config.parallel), in_tree=run.config.train.exact)
    for file, step in zip(files[mesh.rank], steps[mesh.rank], strict=False):
        StateInMemory(file).write(step, state(step), {"layout": StatesInMemory((), written.config).layout})
    kept = StatesInMemory(files[mesh.rank], run.config)
    found = kept.newest(mesh.world)
    for each in kept.states:
        each.close()
    return found


def test_a_state_counts_only_on_all_ranks_and_in_its_layout(pool: WorkerPool, small_run: Run) -> None:
    run = small_run.but(dp=2, set=(("checkpoint.memory_every", 1),))
    for written, steps, expected in (
        (run, ((4, 5), (4, 5)), 5),
        (run, ((4, 5), (4, 3)), 4),
        (run, ((5,), (4,)), None),
        (run.but(dp=1, tp=2), ((4, 5), (4, 5)), None),
    ):
        assert pool.run(2, newest_kept, run, written, memory_files(2), steps) == [expected] * 2


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
    assert sorted(StateInMemory(file).step or 0 for file in files[0]) == [2, 3]
