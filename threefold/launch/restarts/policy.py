"""Whether the ranks of a local run are started again after one has failed, and in which layout."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threefold.checkpoint.resume import has_all_steps
from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.errors import UserError
from threefold.files import read_text
from threefold.launch.environment import find_launched_rank
from threefold.launch.failure import Failure, RankFailed
from threefold.launch.output import failure_file
from threefold.launch.restarts.fallbacks import Fallback, smaller
from threefold.launch.worker import NextAttempt
from threefold.train.recovery.attempt import Attempt, fresh_files, memory_files
from threefold.train.recovery.goodput import FILE, Goodput


@dataclass(frozen=True)
class _Seen:
    """How an attempt failed: two that are equal were no chance."""

    rank: int
    kind: str
    step: int


class Restarts:
    """Called after each failure of an attempt: makes the next one, or raises what ends the run.

    Args:
        config: resolved.
        run_dir: the run's folder.
        fallbacks: with which the run can go on; their configs resolved.
        began: `time.time()` at which the start of the run began.
        make: the arguments of the ranks of an attempt, from its config and itself.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        fallbacks: Sequence[Fallback],
        began: float,
        make: Callable[[Config, Attempt], tuple[Any, ...]],
    ) -> None:
        self._config, self._run_dir, self._fallbacks, self._make = config, run_dir, tuple(fallbacks), make
        ranks = Layout.of(config.parallel).world_size
        memory = memory_files(ranks) if config.train.max_restarts and config.checkpoint.memory_every else ()
        self._attempt = Attempt(most=config.train.max_restarts, began=began, memory=memory)
        self._before: _Seen | None = None

    def first(self) -> tuple[Any, ...]:
        """The arguments of the first attempt."""
        return self._make(self._config, self._attempt)

    def __call__(self, failure: Failure) -> NextAttempt | None:
        """The next attempt after a failure; None where the run is complete, so that nothing is left to do.

        Raises:
            UserError: the failure is the user's to correct.
            RankFailed: the run is given up.
        """
        message, most = failure.message(self._run_dir), self._attempt.most
        if failure.is_final or not most:
            raise failure.exception(self._run_dir)
        if has_all_steps(self._run_dir, self._config.train.max_steps):
            return None
        if self._attempt.number >= most:
            times = "once" if most == 1 else f"{most:,} times"
            raise RankFailed(f"{message}; given up, as the ranks were restarted {times} (train.max_restarts {most})")
        self._follow(failure, message)
        return NextAttempt(self._make(self._config, self._attempt), Layout.of(self._config.parallel).world_size)

    def _follow(self, failure: Failure, message: str) -> None:
        """Take the layout of the next attempt, and note how this one failed.

        Raises:
            RankFailed: the run would only fail in the same way again.
        """
        ledger = Goodput.read(self._run_dir / FILE) or Goodput()
        seen = _Seen(failure.rank, re.sub(r"\d+", "", failure.error), ledger.step)
        again = self._before
        layout = ""
        if again is not None and again.rank == seen.rank:  # lost twice in a row: it may be its place that is broken
            found = smaller(self._fallbacks, Layout.of(self._config.parallel).world_size)
            if found is not None:
                self._config, layout, again = found.config, str(found), None
        if again == seen:
            where = f"step {seen.step + 1:,}" if seen.step else "the first step, or the start before it,"
            raise RankFailed(
                f"{message}; given up, as {where} failed in the same way twice in a row with no other step made in "
                "between"
            )
        self._before = None if layout else seen
        self._attempt = replace(
            self._attempt,
            number=self._attempt.number + 1,
            began=time.time(),
            failure=message,
            layout=layout or self._attempt.layout,
            memory=fresh_files(self._attempt.memory) if failure.hardware else self._attempt.memory,
        )


def launched_attempt(run_dir: Path, began: float, layout: str) -> Attempt:
    """The attempt of the launcher that started this process; the first where none did.

    Args:
        run_dir: the run's folder, in which a rank of the attempt before may have said why it failed.
        began: `time.time()` at which the start of this process's run began.
        layout: of the run, where it is one of its fallbacks; else empty.
    """
    launched = find_launched_rank()
    if launched is None or not launched.attempt:
        return Attempt(began=began, layout=layout)
    try:
        failure = read_text(failure_file(run_dir)).strip()
    except UserError:  # no rank could say
        failure = ""
    return Attempt(launched.attempt, launched.restarts, began, failure, layout)
