"""Checkpoints by the clock and for good, and runs that end before their time limit."""

import contextlib
import io
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.train.support import Run, losses_of, train, train_rank
from threefold.checkpoint.folder import complete, newest, superfluous
from threefold.errors import UserError
from threefold.train.stop import Requests, RunClock, Stop, Stopped
from threefold.verify.worker_pool import WorkerPool


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in complete(run_dir)]


def test_a_period_of_the_clock_saves_on_all_ranks(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """A period that every step exceeds: each step but the first saves what the one before asked for, or sooner."""
    run = small_run.but(dp=2, set=(("checkpoint.every_seconds", 1e-6), ("checkpoint.keep", 0)))
    pool.run(2, train_rank, run, tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_some_are_kept_for_good(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    settings = (("checkpoint.every", 1), ("checkpoint.keep", 1), ("checkpoint.keep_every", 3))
    pool.run(1, train_rank, small_run.but(steps=8, set=settings), tmp_path)
    assert steps(tmp_path) == [3, 6, 8]


def test_which_are_superfluous() -> None:
    assert superfluous([1, 2, 3, 4], 0) == []
    assert superfluous([1, 2, 3, 4], 3) == [1]
    assert superfluous([2, 4, 6, 8, 10], 2, 4) == [2, 6]
    assert superfluous([2], 2, 4) == []


def test_those_for_good_are_among_those_that_are_made(small_run: Run) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.keep_every is 7 but must be a multiple of .* 2; use 8"):
        _ = small_run.but(set=(("checkpoint.every", 2), ("checkpoint.keep_every", 7))).config
    with pytest.raises(UserError, match=r"checkpoint\.keep_every is 7 but checkpoint\.every is 0"):
        _ = small_run.but(set=(("checkpoint.keep_every", 7),)).config


def limited(run: Run, folder: Path) -> Stopped | None:
    with contextlib.redirect_stdout(io.StringIO()):
        return train(run.config, folder, False)


@pytest.mark.slow
def test_a_run_ends_before_its_limit_and_goes_on(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """A limit of which a short start-up is the most."""
    run = small_run.but(dp=2, steps=100_000, set=(("train.max_seconds", 4.0), ("optimizer.decay", "constant")))
    stopped, other = pool.run(2, limited, run, tmp_path / "run")
    assert stopped == other
    assert stopped.limit == "train.max_seconds 4"
    assert (stopped.signal, stopped.reason) == (0, "")
    found = newest(tmp_path / "run")
    assert found is not None
    assert found.step == stopped.step
    free = run.but(steps=stopped.step + 2, set=run.set[1:])
    pool.run(2, train_rank, free, tmp_path / "run", True)
    pool.run(2, train_rank, free, tmp_path / "unbroken")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "unbroken")


def test_time_is_up_early_enough_for_the_slowest_save(small_run: Run) -> None:
    config = small_run.but(set=(("train.max_seconds", 100.0),)).config

    def is_up(passed: float, save: float) -> bool:
        clock = RunClock(config, time.time() - passed)
        clock.saved(save)
        return clock.time_is_up()

    assert not is_up(passed=50, save=20)
    assert is_up(passed=90, save=20)
    assert is_up(passed=101, save=0)
    before_any = RunClock(config, time.time() - 50)
    before_any.begin(10**10)
    assert before_any.time_is_up()  # 10 GB are assumed to take more than 50 seconds


def test_what_the_clock_asks_is_told_apart_in_a_sum_over_many_ranks() -> None:
    class Clock:
        limit = "a limit"

        def __init__(self, due: bool, up: bool, ended: bool) -> None:
            self.due, self.up, self.ended = due, up, ended

        def save_is_due(self) -> bool:
            return self.due

        def time_is_up(self) -> bool:
            return self.up

        def save_ended(self) -> bool:
            return self.ended

    for case in range(32):
        due, up, ended, asked, reason = (bool(case >> bit & 1) for bit in range(5))
        first = Stop(clock=Clock(due, up, ended))  # type: ignore[arg-type]
        others = Stop(lambda asked=asked: 15 if asked else 0)  # type: ignore[misc]
        if reason:
            others.ask("enough")
        pairs = zip(first.requests(), others.requests(), strict=True)
        first.receive(Requests(*(own + ((1 << 16) - 1) * other for own, other in pairs)))
        assert (first.save_is_due, first.save_ended) == (due, ended)
        assert first.is_due == (up or asked or reason)
        assert first.signal == (15 if asked else 0)


def due_once(run: Run, folder: Path) -> None:
    """Train with a clock that is due once, on the first rank alone."""
    asked: list[None] = []

    def is_due(clock: RunClock) -> bool:
        asked.append(None)
        return dist.get_rank() == 0 and len(asked) == 2

    with patch.object(RunClock, "save_is_due", is_due), contextlib.redirect_stdout(io.StringIO()):
        train(run.config, folder, False)


def test_the_clock_of_the_first_rank_decides_for_all(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(dp=2, steps=5, set=(("checkpoint.every_seconds", 3600.0), ("checkpoint.keep", 0)))
    pool.run(2, due_once, run, tmp_path)
    first, last = steps(tmp_path)
    assert (first in (1, 2, 3), last) == (True, 5)
