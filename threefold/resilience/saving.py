"""Checkpoints of a run that are written in the background (`checkpoint.async_save`) or copied (`checkpoint.remote`)."""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from threefold.checkpoint.folder import from_first
from threefold.checkpoint.save import Written
from threefold.resilience.background_saving import BackgroundSaver
from threefold.resilience.remote_copier import RemoteCopies
from threefold.train.callbacks.base import FailureWarning, say
from threefold.train.saving import CheckpointContents, Checkpoints
from threefold.train.state import StartingPoint
from threefold.train.stop import RunClock

_LONG_WAIT: Final = 1.0  # seconds of waiting for the previous checkpoint above which a warning is printed


class BackgroundCheckpoints(Checkpoints):
    """Checkpoints with work beside training. Collective over the world.

    Args:
        background: writes the checkpoints other than the last; None to wait for each.
        copies: copies of the checkpoints elsewhere, whose address is taken; None for none.
        resumes: whether the run goes on from an earlier one, whose address it may be.

    Raises:
        UserError: on every rank, if the address is another run's.
    """

    def __init__(
        self,
        run_dir: Path,
        contents: CheckpointContents,
        start: StartingPoint,
        clock: RunClock,
        background: BackgroundSaver | None,
        copies: RemoteCopies | None,
        resumes: bool,
    ) -> None:
        if copies is not None:
            from_first(contents.engine.mesh.world, lambda: _say(copies.claim(resumes, contents.dataset)))
        super().__init__(run_dir, contents, start, clock)
        self._background, self.is_background = background, background is not None
        advice = "save less often (checkpoint.every) to spare that"
        self._waiting = FailureWarning(self.engine.mesh.world.is_first, advice)
        self._copies, self._copier, self._pruned = copies, None if copies is None else copies.copier, -1
        if self._copier is not None and start.resumed is not None:
            self._copier.add(start.resumed.step, start.resumed.path, if_missing=True)

    def save(self, step: int, last: bool = False, evaluation_missed: bool = False) -> Path | None:
        """Save as `Checkpoints`, in the background if configured and if it is not the last.

        A background save returns the folder that the checkpoint will have.
        """
        if self._background is None or last:
            return super().save(step, last, evaluation_missed)
        tensors, texts = self._begin()
        facts = self._facts(step, evaluation_missed)
        return self._background.save(self.run_dir, facts, tensors, texts)

    def finish(self) -> Written | None:
        """Wait for the checkpoint being written in the background; warn if it failed; return it once, else None."""
        if self._background is None:
            return None
        begun = time.monotonic()
        written, waited = self._background.wait(), time.monotonic() - begun
        if written is None:
            return None
        if waited > _LONG_WAIT:
            self._waiting.failed(
                f"The checkpoint of step {written.step} was still being written {waited:.1f} s after the next was due, "
                "for which the ranks have waited"
            )
        if written.failure is not None:
            self._saving.failed(str(written.failure))
        else:
            self._complete(written.step, written.path, written.seconds)
        return written

    def end(self, seconds: float | None = None) -> str | None:
        """End the background writes and the copying, see `Checkpoints`."""
        if self._background is not None and self._background.end(seconds):
            self.finish()
        if self._copier is None:
            return None
        progress = self.engine.mesh.heartbeat.progress
        missing = self._copier.end(seconds, progress)
        if self._pruned >= 0:  # those that were still to be copied then
            self._prune(self._pruned, progress)
        return missing

    def prune(self, step: int) -> None:
        """Delete as `Checkpoints`; only with the checkpoint of `step` complete are older ones superfluous."""
        if self._background is None or not self.engine.mesh.world.is_first:
            super().prune(step)
        else:
            self._background.then(lambda: self._prune(step, lambda: None))

    def _prune(self, step: int, progress: Callable[[], None], used: Collection[Path] = ()) -> None:
        self._pruned = step
        super()._prune(step, progress, () if self._copier is None else self._copier.in_use)

    def set_aside(self, step: int) -> tuple[Path, Path] | None:
        moved = super().set_aside(step)
        if moved is not None and self._copier is not None:
            self._copier.remove(step, self.engine.mesh.heartbeat.progress)
        return moved

    def _replaced(self, path: Path, reason: str) -> bool:
        copies, world = self._copies, self.engine.mesh.world
        if copies is None:
            return False
        copy, lines = from_first(world, lambda: copies.replace_damaged({path: reason}))
        if world.is_first:
            _say(lines)
        return copy == path

    def _complete(self, step: int, path: Path, seconds: float, last: bool = False) -> None:
        super()._complete(step, path, seconds, last)
        if self._copier is not None:
            self._copier.add(step, path, last)


def _say(lines: Collection[str]) -> None:
    for line in lines:
        say(line)
