"""Copies of a run's checkpoints at the address of `checkpoint.remote`, which an attached room makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from threefold.checkpoint.folder import Damaged
from threefold.config import Config
from threefold.data.dataset import Dataset
from threefold.doors import needed


class Mirror(Protocol):
    """Background copier of a run's checkpoints; on the first rank alone."""

    @property
    def in_use(self) -> frozenset[Path]:
        """Local folders that are still to be read."""

    def add(self, step: int, folder: Path, is_last: bool = False, if_missing: bool = False) -> None:
        """Queue a checkpoint: with `is_last` no other follows, with `if_missing` one that is there is not copied."""

    def remove(self, step: int, progress: Callable[[], None]) -> None:
        """Delete the copy of a step; `progress` is called while that takes its time."""

    def end(self, seconds: float | None, progress: Callable[[], None]) -> str | None:
        """End within this many seconds (None: when all is copied); return a sentence if the last copy is missing."""


class Copies(Protocol):
    """Copies of a run's checkpoints; the address must not be another run's, which would be a `UserError`.

    Attributes:
        mirror: copier of the run's checkpoints; None before `claim`.
    """

    mirror: Mirror | None

    def new_files(self) -> list[str]:
        """Return the names of files that a claim would add to the run's folder."""

    def look(self, resumes: bool, dataset: Dataset, writes: bool, last: int) -> tuple[str, ...]:
        """Check the address before a run, and fetch its newest copy if it is newer; return lines about it.

        `writes` is whether to try to write there, and `last` the step whose checkpoint here has to be read whole.
        """

    def copy_newest(self) -> Path | None:
        """Copy the newest checkpoint of the run that was looked at; return its folder if it was not there yet."""

    def claim(self, resumes: bool, dataset: Dataset) -> list[str]:
        """Take the address for the run, whose `mirror` is ready then; return lines about it."""

    def replace_damaged(self, damaged: Damaged) -> tuple[Path | None, tuple[str, ...]]:
        """Replace checkpoints that loading found damaged; return the folder of the newest copy, and lines about it."""


def copies_of(config: Config, run_dir: Path) -> Copies | None:
    """Return the copies of a run's checkpoints; None if its config names no address for them."""
    if config.checkpoint.remote is None:
        return None
    make = needed("remote_copies", "checkpoint.remote", "resilience")
    return cast(Copies, make(config, run_dir))
