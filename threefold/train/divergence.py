"""Divergence: keeps the checkpoints of a run good when its loss, gradients or weights become NaN or infinite."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Protocol

from threefold.checkpoint.background import Written
from threefold.checkpoint.manifest import Facts
from threefold.errors import UserError
from threefold.train.callbacks.base import EvaluationRecord, StepRecord


class DivergenceError(UserError):
    """The loss, the gradient or the weights are not finite, and a smaller loss scale would not help."""


class CheckpointStore(Protocol):
    """Stores a run's checkpoints. Each method is collective over the world."""

    @property
    def is_background(self) -> bool:
        """Whether `save` returns before a checkpoint is complete, unless it is the last."""
        ...

    def save(self, step: int, last: bool = False) -> Path | None:
        """Save a checkpoint after `step` updates, and return its folder; None where it could not be written and is not
        the last of the run."""
        ...

    def finish(self) -> Written | None:
        """Wait for the checkpoint that is being written in the background, and return it once."""
        ...

    def end(self, seconds: float | None = None) -> None:
        """End what goes on beside the training, for which it may take so many seconds; None for as many as it takes."""
        ...

    def prune(self, step: int) -> None:
        """Delete old checkpoints, now that the one of `step` is known to be good."""
        ...

    def is_finite(self) -> bool:
        """Whether weights and optimizer state are finite on every rank."""
        ...

    def whole(self) -> list[Path]:
        """Folders of the complete checkpoints, oldest first."""
        ...

    def set_aside(self, step: int) -> tuple[Path, Path] | None:
        """Rename the checkpoint of `step` so that no run resumes from it; returns its new and the next older folder, or
        None where it is the only one and stays."""
        ...

    def load(self, path: Path) -> Facts:
        """Load one of the run's checkpoints into the engine, and return its facts."""
        ...


class SafeSaving:
    """Saves when a checkpoint is due, and never replaces a good checkpoint by one of a diverged model.

    A checkpoint is good once its weights have given a finite loss, in a step that was not skipped or in an evaluation:
    a bad update shows in the loss after it. So

    - a save that is due while steps are skipped, or after a loss that is not finite, waits for the next good step;
    - older checkpoints are deleted only when the new one is known to be good, and is complete;
    - when the run diverges, a checkpoint that no good step followed is renamed, and a resumed run starts from the one
      before it.

    The losses are the same on all ranks, so all make the same decision.

    Args:
        store: where the checkpoints go.
        is_proved: whether nothing else has to be known of a checkpoint, given its step, before older ones are deleted.
    """

    def __init__(self, store: CheckpointStore, is_proved: Callable[[int], bool] | None = None) -> None:
        self._store, self._is_proved = store, is_proved or (lambda step: True)
        self._due, self._healthy = False, True
        self._unproved: int | None = None
        self._tried: Path | None = None
        self._newest: int | None = None
        """Of a checkpoint that a good step followed, while older ones are kept."""
        self._steps = 0

    def after_step(self, record: StepRecord) -> None:
        """Record a step; call directly after it."""
        self._healthy = not record.skipped
        if self._healthy:
            self._steps += 1
            self._tried = None
            self._prove()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        """Record the validation loss."""
        self._healthy = self._healthy and isfinite(record.loss)

    def will_save(self, due: bool) -> bool:
        """Whether `save` would save now: a checkpoint is due, or was, and the last loss was finite."""
        return (self._due or due) and self._healthy

    def save(self, step: int, due: bool) -> Path | None:
        """Save after `step` updates if a checkpoint is due, or was, and the last loss was finite; None otherwise, and
        where it could not be written: then the next one that is due tries again.

        Raises:
            DivergenceError: the weights are not finite.
        """
        saves = self.will_save(due)
        self._due = self._due or due
        return self._save(step) if saves else None

    @property
    def is_background(self) -> bool:
        """Whether `save` returns before a checkpoint is complete, unless it is the last."""
        return self._store.is_background

    def finish(self) -> Written | None:
        """Wait for the checkpoint that is being written in the background; returns it once it is complete, else None.
        Collective over the world."""
        written = self._store.finish()
        if written is None or written.failure is None:
            return written
        if self._unproved == written.step:
            self._unproved = None
        return None

    def end(self, seconds: float | None = None) -> None:
        """End what goes on beside the training, for which it may take so many seconds; None for as many as it takes."""
        self._store.end(seconds)

    def save_last(self, step: int, loss: Callable[[], float]) -> Path:
        """Save the checkpoint after the last step of this process, which no later step can show to be good.

        Args:
            step: updates made.
            loss: computes a loss from the weights as they are.

        Raises:
            DivergenceError: weights or loss are not finite.
            UserError: on every rank, when it cannot be written.
        """
        value = loss()
        if not isfinite(value):
            raise self.explained(
                DivergenceError(f"Training diverged at step {step}: the loss of the weights after it is {value:g}")
            )
        path = self._save(step, last=True)
        assert path is not None  # else it raises
        if self._healthy:  # else all that is known is that the weights have not changed since the last good step
            self._prove()
        return path

    def roll_back(self) -> Path | None:
        """The checkpoint to load after a bad step: the newest, or where no good step followed after it had been loaded
        like that, the one before it, the newest being set aside; None where there is none."""
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
        """Where a run that ends for a fault of the hardware resumes from, as a clause: no checkpoint is in doubt."""
        whole = self._store.whole()
        return f"--resume starts from {whole[-1]}" if whole else "there is no checkpoint to resume from"

    def explained(self, error: DivergenceError) -> DivergenceError:
        """The error with the checkpoint to resume from; one that no good step followed is set aside."""
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
    """The updates of a checkpoint's folder."""
    return int(path.name.partition(".")[0].rpartition("_")[2])
