"""Training callbacks: the base class, what each moment of a run hands them, and what they are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from threefold.config import Config

if TYPE_CHECKING:
    from threefold.comm.mesh import Mesh
    from threefold.data.loader import Batch


@dataclass(frozen=True)
class StepRecord:
    """A finished step, the same on every rank but for the times.

    Attributes:
        step: 1 for the first.
        loss: mean over the global batch's tokens whose label is not ignored.
        grad_norm: global gradient norm before clipping; not finite where the gradient overflowed.
        lr: learning rate of this update.
        tokens: tokens of the global batch whose label is not ignored.
        tokens_read: all tokens of the global batch but padding.
        epoch: passes over the training samples completed before it.
        batch: the step's number in its epoch, 0 for the first.
        reader_cost: seconds that the step waited for its data.
        seconds: duration of the step, reading included.
        skipped: whether the gradient overflowed, so that no update was made.
        loss_scale: loss scale of the backward pass; None without loss scaling.
        padding: padding tokens of the global batch.
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
        """Tokens read per second, without padding."""
        return self.tokens_read / self.seconds


@dataclass(frozen=True)
class EvaluationRecord:
    """A finished evaluation.

    Attributes:
        step: updates made so far.
        loss: mean over the tokens whose label is not ignored; of a mixture, the sum of each corpus's mean times its
            weight.
        tokens: number of those tokens.
        seconds: duration.
        corpus_losses: for a mixture, each corpus's mean by name.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    corpus_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """What a callback is made from, on each rank.

    Attributes:
        config: resolved.
        run_dir: the run's folder, which exists.
        mesh: this rank's place in the layout, with the process groups of its axes.
    """

    config: Config
    run_dir: Path
    mesh: "Mesh"


class Callback:
    """Base class of training callbacks: each method is called at its moment of the run, and does nothing here.

    The order in a run is: before_fit; for each step before_epoch (if one begins), before_step, after_step, after_epoch
    (if one is complete), before_evaluation and after_evaluation (if due), after_checkpoint (if due); then after_fit,
    if nothing failed, and close, always. An exception ends the run.

    Attributes:
        ranks: whether global rank 0 alone has the callback, which is called once for the run then, or every rank has
            one of its own. A callback that calls a collective must be on all ranks of the collective's group.
    """

    ranks: ClassVar[Literal["first", "all"]] = "first"

    @classmethod
    def for_run(cls, run: RunContext) -> "Callback | None":
        """The callback of this rank, made before the first step; None where the run needs none.

        Called on the ranks that `ranks` says. Here: `cls()`.
        """
        return cls()

    def before_fit(self, start: int) -> None:
        """Before the first step; `start` updates were made before (0 in a new run, more in a resumed one)."""

    def before_epoch(self, epoch: int) -> None:
        """The next step is the first of `epoch`, or the first of a resumed run."""

    def before_step(self, step: int, batch: "Batch") -> None:
        """Before update number `step` (1 for the first), with this rank's `batch`."""

    def after_step(self, record: StepRecord) -> None:
        """After an optimizer step; the record is the same on every rank, but for the times."""

    def after_epoch(self, epoch: int) -> None:
        """All samples of `epoch` have been read."""

    def before_evaluation(self, step: int) -> None:
        """Before an evaluation on the validation part, after `step` updates."""

    def after_evaluation(self, record: EvaluationRecord) -> None:
        """After an evaluation."""

    def after_checkpoint(self, step: int, path: Path) -> None:
        """A complete checkpoint has been saved at `path`."""

    def after_fit(self) -> None:
        """After the last step; not called when the run failed or was stopped."""

    def close(self) -> None:
        """The run has ended, been stopped or failed."""
