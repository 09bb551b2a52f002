"""What may be told of a run while it goes on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threefold.data.loader import Batch


@dataclass(frozen=True)
class StepRecord:
    """A finished step, the same on every rank but for the times.

    Attributes:
        step: 1 for the first.
        loss: mean over the global batch's tokens that count.
        grad_norm: before clipping; not finite where it overflowed.
        lr: the rate of this update.
        tokens: tokens of the global batch that count for the loss.
        tokens_read: all tokens of the global batch but padding.
        epoch: passes over the training samples completed before it.
        batch: the step's number in its epoch, 0 for the first.
        reader_cost: seconds that the step waited for its data.
        seconds: that it took, reading included.
        skipped: whether the gradient overflowed, so that no update was made.
        loss_scale: what the loss was multiplied by for the backward pass; None where it never is.
        padding: tokens that fill the global batch's samples up to their length.
        corpus_epochs: for a mixture, passes over each corpus before it, by name.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_read: int
    epoch: int
    batch: int
    reader_cost: float
    seconds: float
    skipped: bool = False
    loss_scale: float | None = None
    padding: int = 0
    corpus_epochs: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Tokens read, without padding, over the time of the step."""
        return self.tokens_read / self.seconds


@dataclass(frozen=True)
class EvaluationRecord:
    """A finished evaluation.

    Attributes:
        step: updates made so far.
        loss: mean over the tokens that count; of a mixture, the sum of each corpus's mean times its weight.
        tokens: how many those were.
        seconds: that it took.
        corpus_losses: for a mixture, each corpus's mean by name.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    corpus_losses: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Base of the hooks: each method is called at its moment, on every rank that has the hook, and does nothing here.

    The order in a run is: before_fit; for each step before_epoch (if one begins), before_step, after_step, after_epoch
    (if one is complete), before_evaluation and after_evaluation (if due), after_checkpoint (if due); then after_fit,
    if nothing failed, and close, always.
    """

    def before_fit(self, start: int) -> None:
        """`start` updates have been made before (0 in a new run)."""

    def before_epoch(self, epoch: int) -> None:
        """The first step of `epoch` comes next, or the first of a resumed run."""

    def before_step(self, step: int, batch: "Batch") -> None:
        """Update number `step` (1 for the first) is to be made from this rank's `batch`."""

    def after_step(self, record: StepRecord) -> None:
        """An update was made."""

    def after_epoch(self, epoch: int) -> None:
        """All samples of `epoch` have been read."""

    def before_evaluation(self, step: int) -> None:
        """An evaluation begins."""

    def after_evaluation(self, record: EvaluationRecord) -> None:
        """An evaluation has ended."""

    def after_checkpoint(self, step: int, path: Path) -> None:
        """A whole checkpoint lies at `path`."""

    def after_fit(self) -> None:
        """All steps have been made."""

    def close(self) -> None:
        """The run has ended or failed."""
