"""Copies each complete checkpoint of a run to `checkpoint.remote`, in a thread beside the training."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from threefold.checkpoint.saving.background import WorkThread
from threefold.checkpoint.saving.remote import RemoteCheckpoints
from threefold.errors import UserError

_LOOK: Final = 0.5
"""Seconds between two looks at what is being copied, while it is waited for."""


class Mirror:
    """Copies the checkpoints of a run, on one rank. One that has not been begun when a newer one comes is left out,
    unless it is kept for good; what is left of a run's end is waited for.

    Args:
        remote: where they go.
        keep, keep_every: which of them stay there, as of `superfluous`.
        failed: gets the sentence about one that could not be copied.
        copied: called after one that was.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        keep: int,
        keep_every: int | None,
        failed: Callable[[str], None],
        copied: Callable[[], None],
    ) -> None:
        self._remote, self._keep, self._keep_every = remote, keep, keep_every
        self._failed, self._copied = failed, copied
        self._thread = WorkThread("threefold-remote")
        self._lock = threading.Lock()
        self._waiting: dict[int, Path] = {}
        self._current: Path | None = None

    @property
    def in_use(self) -> frozenset[Path]:
        """The local folders that are still to be read."""
        with self._lock:
            return frozenset(self._waiting.values()) | ({self._current} if self._current else frozenset())

    def add(self, step: int, folder: Path) -> None:
        """Copy the complete checkpoint of a step."""
        with self._lock:
            if self._keep:
                self._waiting = {old: path for old, path in self._waiting.items() if self._stays(old)}
            self._waiting[step] = folder
        self._thread.do(self._copy_next)

    def remove(self, step: int, progress: Callable[[], None] = lambda: None) -> None:
        """Delete the copy of a checkpoint after which the model diverged; waits for what is being copied, and calls
        `progress` meanwhile, as the file system that it goes to has timeouts of its own."""
        while not self._thread.wait(_LOOK):
            progress()
        try:
            self._remote.remove(step)
        except UserError as error:
            self._failed(str(error))

    def end(self, seconds: float | None = None) -> None:
        """End the thread after what it was given, for which it may take so many seconds; None for as many as needed."""
        self._thread.wait(seconds)
        self._thread.end()

    def _stays(self, step: int) -> bool:
        return self._keep_every is not None and step % self._keep_every == 0

    def _copy_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            step = next(iter(self._waiting))
            self._current = self._waiting.pop(step)
        try:
            self._remote.upload(self._current)
            self._remote.prune(self._keep, self._keep_every, step)
            self._copied()
        except UserError as error:
            self._failed(str(error))
        except Exception as error:  # such as a checkpoint that was deleted meanwhile
            self._failed(f"{self._current} cannot be copied to {self._remote.address}: {error}.")
        finally:
            with self._lock:
                self._current = None
