"""The clock of a run: checkpoints that are due by it, and the end of the run before its time limit."""

import time
from collections.abc import Callable
from typing import Final

from threefold.config import Config

_FIRST_SAVE: Final = 100e6
"""Bytes per second that the first save is assumed to write, before one has been measured."""


class RunClock:
    """Tells, on the first rank, what is due by the clock; the ranks agree on it in what a step exchanges anyway.

    The run ends early enough for the longest pause between two questions, twice, and for the longest save so far.

    Args:
        config: resolved.
        began: when the run was started, as `time.time` has it.
        state_bytes: of a checkpoint.
        save_ended: says whether a checkpoint that was written in the background is complete, or failed.

    Attributes:
        limit: the setting that ends the run, and its value.
        longest_save: seconds; to be raised by whoever saves.
    """

    def __init__(self, config: Config, began: float, state_bytes: int, save_ended: Callable[[], bool]) -> None:
        self._every, seconds = config.checkpoint.every_seconds, config.train.max_seconds
        self.limit = f"train.max_seconds {seconds:g}" if seconds else ""
        self._end = None if seconds is None else time.monotonic() + seconds - (time.time() - began)
        self._save_ended = save_ended
        self._saved = time.monotonic()
        self._measured, self.longest_save = False, 1.0 + state_bytes / _FIRST_SAVE
        self._asked: float | None = None
        self._longest_pause = 0.0

    def saving(self) -> None:
        """A save begins."""
        self._saved = time.monotonic()

    def saved(self, seconds: float) -> None:
        """A save has taken so long."""
        self.longest_save = max(self.longest_save, seconds) if self._measured else seconds
        self._measured = True

    def save_is_due(self) -> bool:
        """Whether `checkpoint.every_seconds` have passed since the last save began."""
        return self._every is not None and time.monotonic() - self._saved >= self._every

    def time_is_up(self) -> bool:
        """Whether the run has to end now; to be asked once a step, and in evaluations."""
        if self._end is None:
            return False
        now = time.monotonic()
        if self._asked is not None:
            self._longest_pause = max(self._longest_pause, now - self._asked)
        self._asked = now
        return now + 2 * self._longest_pause + self.longest_save >= self._end

    def save_ended(self) -> bool:
        """Whether a checkpoint that was written in the background is complete, or failed."""
        return self._save_ended()
