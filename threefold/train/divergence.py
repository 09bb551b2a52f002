"""Divergence: keeps a run's checkpoints good when its loss, gradients or weights become NaN or infinite."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Protocol

from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.save import Written
from threefold.errors import UserError
from threefold.train.callbacks.base import EvaluationRecord, StepRecord


class DivergenceError(UserError):
    """Error of a loss, gradient or weights that are not finite, when a smaller loss scale would not help."""


class CheckpointStore(Protocol):
    """Store of a run's checkpoints. All methods are collective over the world."""

    @property
    def is_background(self) -> bool:
        """Whether `save` returns before a checkpoint is complete, except for the last one."""
        ...

    def save(self, step: int, last: bool = False) -> Path | None:
        """Save a checkpoint after `step` updates; return its folder, or None if it failed and is not the last."""
        ...

    def finish(self) -> Written | None:
        """Wait for the checkpoint being written in the background, and return it once."""
        ...

    def end(self, seconds: float | None = None) -> None:
        """End the background writes, within this many seconds; None to wait until they are done."""
        ...

    def prune(self, step: int) -> None:
        """Delete old checkpoints, now that the one of `step` is known to be good."""
        ...

    def is_finite(self) -> bool:
        """Return whether weights and optimizer state are finite on every rank."""
        ...

    def whole(self) -> list[Path]:
        """Return the folders of the complete checkpoints, oldest first."""
        ...

    def set_aside(self, step: int) -> tuple[Path, Path] | None:
        """Rename the checkpoint of `step` so that no run resumes from it; return its new folder and the next older one.

        Returns None if it is the only checkpoint, which then stays.
        """
        ...

    def load(self, path: Path) -> Facts:
        """Load one of the run's checkpoints into the engine, and return its facts."""
        ...


class SafeSaving:
    """Save due checkpoints, and never replace a good checkpoint with one of a diverged model.

    A checkpoint is good once its weights have given a finite loss, in a step that was not skipped or in an evaluation:
    a bad update shows in the next loss. Hence

    - a save that is due while steps are skipped, or after a loss that is not finite, waits for the next good step;
    - older checkpoints are deleted only when the new one is complete, good, and proved by `is_proved`, given its step;
    - when the run diverges, a checkpoint that no good step followed is renamed; a resumed run starts from the one
      before.

    All ranks see the same losses and make the same decisions.
    """

    def __init__(self, store: CheckpointStore, is_proved: Callable[[int], bool] | None = None) -> None:
        self._store, self._is_proved = store, is_proved or (lambda step: True)
        self._due, self._healthy = False, True
        self._unproved: int | None = None
        self._tried: Path | None = None
        self._newest: int | None = None
        """Step of a checkpoint that a good step followed, while older ones are kept."""
        self._steps = 0

    def after_step(self, record: StepRecord) -> None:
        """Record a step; call it directly after the step."""
        self._healthy = not record.skipped
        if self._healthy:
            self._steps += 1
            self._tried = None
            self._prove()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        """Record the validation loss."""
        self._healthy = self._healthy and isfinite(record.loss)

    def will_save(self, due: bool) -> bool:
        """Return whether `save` would save now: a checkpoint is or was due, and the last loss was finite."""
        return (self._due or due) and self._healthy

    def save(self, step: int, due: bool) -> Path | None:
        """Save after `step` updates if a checkpoint is or was due and the last loss was finite; return its folder.

        A checkpoint that could not be written is tried again when the next one is due.

        Raises:
            DivergenceError: the weights are not finite.
        """
        saves = self.will_save(due)
        self._due = self._due or due
        return self._save(step) if saves else None

    @property
    def is_background(self) -> bool:
        """Whether `save` returns before a checkpoint is complete, except for the last one."""
        return self._store.is_background

    def finish(self) -> Written | None:
        """Wait for the checkpoint being written in the background; return it once if complete. Collective."""
        written = self._store.finish()
        if written is None or written.failure is None:
            return written
        if self._unproved == written.step:
            self._unproved = None
        return None

    def end(self, seconds: float | None = None) -> None:
        """End the background writes, within this many seconds; None to wait until they are done."""
        self._store.end(seconds)

    def save_last(self, step: int, loss: Callable[[], float]) -> Path:
        """Save the checkpoint after the last step of this process, which no later step can prove good, so `loss` does.

        Raises:
            DivergenceError: weights or loss are not finite.
            UserError: on every rank, if the checkpoint cannot be written.
        """
        value = loss()
        if not isfinite(value):
            raise self.explained(
                DivergenceError(f"Training diverged at step {step}: the loss of the weights after it is {value:g}")
            )
        path = self._save(step, last=True)
        assert path is not None  # the last save raises instead
        if self._healthy:  # otherwise the weights are only known to be unchanged since the last good step
            self._prove()
        return path

    def roll_back(self) -> Path | None:
        """Return the checkpoint to load after a bad step, the newest one; None if there is none.

        If the newest was already loaded like this and no good step followed, set it aside and return the one before it.
        """
        self.finish()
        whole = self._store.whole()
        if not whole:
            return None
        found = whole[-1]
        if found == self._tried:
            moved = self._store.set_aside(_step_of(found))
            if moved is None:
                return None
            self._unproved, found = None, moved[1]
        self._tried, self._due, self._healthy = found, False, False
        return found

    def kept(self) -> str:
        """Return a clause with the checkpoint to resume from after a hardware fault, which casts doubt on none."""
        whole = self._store.whole()
        return f"--resume starts from {whole[-1]}" if whole else "there is no checkpoint to resume from"

    def explained(self, error: DivergenceError) -> DivergenceError:
        """Return the error with the checkpoint to resume from; set aside a checkpoint that no good step followed."""
        message = str(error).removesuffix(".")
        self.finish()
        if self._unproved is not None and (moved := self._store.set_aside(self._unproved)):
            aside, older = moved
            return DivergenceError(
                f"{message}; no good step followed the newest checkpoint, which is {aside} now, so --resume starts "
                f"from {older}."
            )
        whole = self._store.whole()
        if not whole:
            return DivergenceError(f"{message}; there is no checkpoint to resume from.")
        if self._steps and self._unproved is None:
            return DivergenceError(f"{message}; --resume starts from {whole[-1]}.")
        ways = f"remove it to resume from {whole[-2]}" if len(whole) > 1 else "start a new run in another folder"
        return DivergenceError(f"{message}; no good step followed {whole[-1]}: {ways}.")

    def _save(self, step: int, last: bool = False) -> Path | None:
        if not self._store.is_finite():
            raise self.explained(
                DivergenceError(f"Training diverged at step {step}: weights or optimizer state are not finite after it")
            )
        self._due = False
        path = self._store.save(step, last)
        if path is not None:
            self._unproved = step
        return path

    def _prove(self) -> None:
        if self._unproved is not None:
            self._newest, self._unproved = self._unproved, None
        if self._newest is not None and self._is_proved(self._newest):
            self._store.prune(self._newest)
            self._newest = None


def _step_of(path: Path) -> int:
    return int(path.name.partition(".")[0].rpartition("_")[2])
