"""Copies of a run's checkpoints in the background, to the address of `checkpoint.remote`."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from threefold.checkpoint.folder import Damaged, best_step, complete, newest
from threefold.config import Config
from threefold.data.dataset import Dataset
from threefold.errors import UserError
from threefold.files import shown
from threefold.resilience.ownership import OWNER_FILE, Claimant, Owner, terms_of
from threefold.resilience.remote import (
    AddressTaken,
    RemoteCheckpoints,
    Restored,
    look_at_remote,
    message_of,
    replace_damaged,
)
from threefold.resilience.work_thread import WorkThread
from threefold.train.callbacks.base import FailureWarning

_RETRIES: Final = (1.0, 4.0, 15.0)
"""Seconds before each further attempt to copy the last checkpoint of a run."""


def claim_address(address: str, run: Claimant) -> tuple[RemoteCheckpoints, list[str]]:
    """Take an address for a run; return the checkpoints there, and a line about an owner so far that is elsewhere."""
    remote = RemoteCheckpoints(address)
    before, now = remote.claim(run)
    if before is None or (before.run, before.host, before.folder) == (now.run, now.host, now.folder):
        return remote, []
    return remote, [f"checkpoint.remote {shown(remote.address)} is this run's from here on; it was that of {before}."]


def copy_newest(address: str, run: Claimant) -> Path | None:
    """Copy a run's newest checkpoint to its address unless it is there; return its folder if it was copied."""
    saved, remote = newest(run.run_dir), RemoteCheckpoints(address)
    if saved is None or saved.step in remote.steps():
        return None
    remote.claim(run)
    remote.upload(saved.path)
    return saved.path


@dataclass(frozen=True)
class _Copy:
    """A checkpoint to copy: `is_last` if no other will follow, `if_missing` if it may be at the address already."""

    step: int
    folder: Path
    is_last: bool = False
    if_missing: bool = False

    @property
    def best(self) -> int | None:
        """Step of the run's best checkpoint now."""
        return best_step(each.facts for each in complete(self.folder.parent.parent))


class RemoteCopier:
    """Background copier of a run's checkpoints to a remote address, on one rank.

    A checkpoint still queued when a newer one arrives is skipped, unless it is kept for good. Retention at the address
    is as in `superfluous`. `failed` receives a sentence about each checkpoint that could not be copied, apart from the
    last, about which `end` tells, `kept` one about older copies that could not be deleted; `copied` is called after
    each checkpoint that was copied.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        keep: int,
        keep_every: int | None,
        failed: Callable[[str], None],
        kept: Callable[[str], None],
        copied: Callable[[], None],
        retries: Sequence[float] = _RETRIES,
    ) -> None:
        self.remote, self._keep, self._keep_every = remote, keep, keep_every
        self._failed, self._kept, self._copied, self._retries = failed, kept, copied, retries
        self._thread = WorkThread("threefold-remote")
        self._lock = threading.Lock()
        self._waiting: dict[int, _Copy] = {}
        self._current: _Copy | None = None
        self._missing: tuple[_Copy, UserError] | None = None  # the newest checkpoint, if it could not be copied

    @property
    def in_use(self) -> frozenset[Path]:
        """Local folders that are still to be read."""
        with self._lock:
            current = (self._current,) if self._current else ()
            return frozenset(each.folder for each in (*self._waiting.values(), *current))

    def add(self, step: int, folder: Path, is_last: bool = False, if_missing: bool = False) -> None:
        """Queue a checkpoint; one that no other will follow is tried again in `end` if it cannot be copied."""
        self._queue(_Copy(step, folder, is_last, if_missing))

    def remove(self, step: int, progress: Callable[[], None] = lambda: None) -> None:
        """Delete the remote copy of a step after the current copy; `progress` is called while that takes its time."""
        self._wait(None, progress)
        if self._missing is not None and self._missing[0].step == step:
            self._missing = None
        try:
            self.remote.remove(step)
        except UserError as error:
            self._kept(str(error))

    def end(self, seconds: float | None = None, progress: Callable[[], None] = lambda: None) -> str | None:
        """End the thread after its queued work, waiting at most `seconds`.

        Without a limit, the newest checkpoint is tried again if it could not be copied. Returns a sentence if it is not
        there in the end.
        """
        self._wait(seconds, progress)
        attempts = 1
        for delay in self._retries if seconds is None else ():
            if self._missing is None or isinstance(self._missing[1], AddressTaken):
                break
            copy, attempts = self._missing[0], attempts + 1
            until = time.monotonic() + delay
            while (left := until - time.monotonic()) > 0:
                progress()
                time.sleep(min(left, 0.5))
            self._queue(copy)
            self._wait(None, progress)
        self._thread.end()
        if self._missing is None:
            return None
        copy, error = self._missing
        tried = f" in {attempts} attempts" if attempts > 1 else ""
        where = f"but {copy.folder} is complete, and --resume=auto copies it"
        return f"The last checkpoint could not be copied{tried}, {where}: {error}"

    def _queue(self, copy: _Copy) -> None:
        with self._lock:
            if self._keep:
                every, best = self._keep_every, copy.best
                kept = [old for old in self._waiting if old == best or (every and old % every == 0)]
                self._waiting = {old: self._waiting[old] for old in kept}
            self._waiting[copy.step] = copy
        self._thread.do(self._copy_next)

    def _wait(self, seconds: float | None, progress: Callable[[], None]) -> None:
        """Wait for the queued work, at most `seconds`; call `progress` meanwhile."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._thread.wait(0.5 if until is None else max(0.0, min(0.5, until - time.monotonic()))):
            if until is not None and time.monotonic() >= until:
                return
            progress()

    def _copy_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            copy = self._current = self._waiting.pop(next(iter(self._waiting)))
        try:
            if not (copy.if_missing and copy.step in self.remote.steps()):
                self.remote.upload(copy.folder)
        except UserError as error:
            self._note(copy, error)
        except Exception as error:  # such as a checkpoint that was deleted meanwhile
            self._note(
                copy, UserError(f"{copy.folder} cannot be copied to {shown(self.remote.address)}: {message_of(error)}.")
            )
        else:
            self._missing = None
            self._copied()
            try:
                self.remote.prune(self._keep, self._keep_every, copy.step, copy.best)
            except UserError as error:
                self._kept(str(error))
        finally:
            with self._lock:
                self._current = None

    def _note(self, copy: _Copy, error: UserError) -> None:
        self._missing = copy, error
        if not copy.is_last:
            self._failed(str(error))


class RemoteCopies:
    """Copies of a run's checkpoints at its address, for the core (`checkpoint.resume.copies_of`)."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir, self._address = config, run_dir, str(config.checkpoint.remote)
        self._run: Claimant | None = None
        self.copier: RemoteCopier | None = None

    def new_files(self) -> list[str]:
        return [] if Owner.of_folder(self._run_dir) else [OWNER_FILE]

    def look(self, resumes: bool, dataset: Dataset, writes: bool, last: int) -> tuple[str, ...]:
        self._run = Claimant(self._run_dir, resumes, terms_of(self._config, dataset))
        return look_at_remote(self._address, self._run, writes, last).lines

    def copy_newest(self) -> Path | None:
        assert self._run is not None  # it was looked at
        return copy_newest(self._address, self._run)

    def claim(self, resumes: bool, dataset: Dataset) -> list[str]:
        run = Claimant(self._run_dir, resumes, terms_of(self._config, dataset))
        remote, lines = claim_address(self._address, run)
        told = FailureWarning(True, "training continues, and the next checkpoint is copied there again")
        kept = FailureWarning(True, "old copies stay there until a later checkpoint is copied")
        settings = self._config.checkpoint
        self.copier = RemoteCopier(remote, settings.keep, settings.keep_every, told.failed, kept.failed, told.worked)
        return lines

    def replace_damaged(self, damaged: Damaged) -> Restored:
        return replace_damaged(self._address, self._run_dir, damaged)
