"""Training callbacks: base class, the records passed to callbacks, and helpers to write callbacks."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from threefold.config import Config
from threefold.errors import OutputLost, UserError
from threefold.train.attempt import Attempt

if TYPE_CHECKING:
    from threefold.comm.mesh import Mesh


@dataclass(frozen=True)
class Performance:
    """Hardware use of a step.

    Attributes:
        flops_per_second: model FLOPs (`threefold.models.block`) of the step per second and rank, averaged over the
            ranks; None for a user's own model.
        mfu: share of a rank's peak rate that this is; None if the peak is not known.
        memory: peak memory of this rank in bytes: resident memory of its process on a CPU, memory reserved by torch on
            a GPU.
        largest_memory: peak memory of the rank that uses most, among the ranks that this one hears of.
        largest_rank: number of that rank.
        waited: seconds of the step that this rank waited in collectives; on a GPU, whose collectives run beside the
            Python code, only the seconds that the code waits.
        wall_clock: seconds since the run, or this attempt of it, started.
    """

    flops_per_second: float | None
    mfu: float | None
    memory: int
    largest_memory: int
    largest_rank: int
    waited: float
    wall_clock: float


@dataclass(frozen=True)
class StepRecord:
    """Record of a finished step, the same on every rank except for the times.

    Attributes:
        step: 1 for the first.
        loss: mean over the global batch's tokens whose label is not ignored.
        grad_norm: global gradient norm before clipping; not finite if the gradient overflowed.
        lr: learning rate of this update.
        tokens: tokens of the global batch whose label is not ignored.
        tokens_read: all tokens of the global batch except padding.
        epoch: passes over the training samples completed before the step.
        batch: number of the step in its epoch, 0 for the first.
        reader_cost: seconds that the step waited for its data.
        seconds: duration of the step, including reading.
        skipped: whether no update was made, because the gradient overflowed or for `reason`.
        loss_scale: loss scale of the backward pass; None without loss scaling.
        padding: padding tokens of the global batch.
        corpus_epochs: for a mixture, passes over each corpus before the step, by name.
        phases: seconds of each phase, which add up to `seconds`: `data`, `callbacks` (their `before_step`),
            `forward_backward` and `update`. On a GPU, `update` includes the forward and backward passes, as it waits
            for their work.
        terms: for a loss of several terms, the mean of each over the global batch, by name; NaN if it counts nothing.
        unit: unit of `tokens` and `tokens_read`: samples for a data set whose samples are not tokens.
        consumed_samples: training samples consumed up to the end of the step, if the global batch size has changed so
            that this is not the step times the size; otherwise None.
        reason: reason why no update was made; empty if one was made or the gradient overflowed. A step that
            `data.skip_steps` or a rollback skips reads no samples: loss and norm are NaN, and the tokens are 0.
        performance: hardware use of the step; None if its samples were not read.
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
    phases: Mapping[str, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    unit: Literal["tokens", "samples"] = "tokens"
    consumed_samples: int | None = None
    reason: str = ""
    performance: Performance | None = None

    @property
    def is_read(self) -> bool:
        """Whether the samples of the step were read; False for a step skipped on purpose or by a rollback."""
        return self.tokens_read > 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens read per second, without padding."""
        return self.tokens_read / self.seconds if self.tokens_read else 0.0


@dataclass(frozen=True)
class EvaluationRecord:
    """Record of a finished evaluation.

    Attributes:
        step: updates made so far.
        loss: mean over the tokens whose label is not ignored; for a mixture, the weighted sum of the corpora's means.
        tokens: number of those tokens; number of samples for a data set whose samples are not tokens.
        seconds: duration of the evaluation.
        corpus_losses: for a mixture, the mean of each corpus by name.
        terms: for a loss of several terms, the mean of each by name; for a mixture, weighted like the loss.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    corpus_losses: Mapping[str, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """Context of a callback's run, on each rank.

    Attributes:
        config: resolved config.
        run_dir: folder of the run, which exists.
        mesh: place of this rank in the layout, with the process groups of its axes.
        attempt: attempt of the run, as its launcher may restart the ranks.
        peak_rate: peak FLOP/s of a rank in the dtype of the config; None if not known.
    """

    config: Config
    run_dir: Path
    mesh: "Mesh"
    attempt: Attempt = field(default_factory=Attempt)
    peak_rate: float | None = None


class CallbackFailed(UserError):
    """Error of a callback; the message names it, its rank and the exception, and the rank's log has the traceback."""


class Callback:
    """Base class of training callbacks: each method is called at its moment of the run, and does nothing by default.

    A callback reports. A built-in callback that also takes part in steps, and decides whether they count, is a `Guard`
    (`threefold.train.loop`).

    Methods are called in this order: setup, before_fit; for each step before_epoch (if one begins), before_step,
    after_step, after_epoch (if one is complete), before_evaluation and after_evaluation (if due), before_checkpoint,
    after_staging (of an asynchronous save) and after_checkpoint (if due); after_stop, if a callback ended the run; then
    after_fit, unless a failure or a signal ended the run; and close, always. A step skipped on purpose
    (`data.skip_steps`) has no before_step, and a step that leads to a rollback has after_rollback in place of
    after_step. At each moment, callbacks are called in order: first the built-in ones in the order of their table, then
    those of `train.callbacks`, then those given to `Trainer`, each as listed. An exception ends the run on all ranks,
    with one sentence that names the callback and its rank.

    Attributes:
        ranks: "first" if only global rank 0 has the callback, so that it is called once per run; "all" if every rank
            has one of its own. A callback that calls a collective must be on all ranks of the collective's group.
        packages: packages that must be importable, beyond those that Threefold installs.
        step_interval: before_step and after_step are called in each step whose number is a multiple of this; 0 for no
            step. A callback may change it at any time.

    Example:
        >>> class StopAtLoss(threefold.Callback):
        ...     def after_step(self, record):
        ...         if record.loss < 2.0:
        ...             self.stop(f"the loss is {record.loss:.2f}")
    """

    ranks: ClassVar[Literal["first", "all"]] = "first"
    packages: ClassVar[tuple[str, ...]] = ()
    step_interval: int = 1
    _stop_reason: str | None = None

    @classmethod
    def for_run(cls, run: RunContext) -> "Callback | None":
        """Make the callback of this rank before the first step; return None if the run needs none.

        Called on the ranks that `ranks` specifies. The default is `cls()`, with the arguments that `train.callbacks`
        gives beside the name; a class that overrides this method gets them here, after `run`.
        """
        return cls()

    def setup(self, run: RunContext) -> None:
        """Hook called first, on each rank of the callback, with the config, the run's folder and the mesh."""

    def before_fit(self, start: int) -> None:
        """Hook called before the first step, after `start` updates (0 in a new run, more in a resumed one)."""

    def before_epoch(self, epoch: int) -> None:
        """Hook called before the first step of `epoch`, or the first step of a resumed run."""

    def before_step(self, step: int, batch: Any) -> None:
        """Hook called before update `step` (1 for the first) with this rank's `batch`.

        The batch has `tokens`, `labels` and `rows`, or is the nesting of tensors that a data set of other samples
        gives.
        """

    def after_step(self, record: StepRecord) -> None:
        """Hook called after an optimizer step; the record is the same on every rank except for the times."""

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        """Hook called when `step` was bad for `reason` and the checkpoint of `start` updates has been loaded.

        The steps after the checkpoint follow again, except those that led to the bad one.
        """

    def after_epoch(self, epoch: int) -> None:
        """Hook called when all samples of `epoch` have been read."""

    def before_evaluation(self, step: int) -> None:
        """Hook called before an evaluation on the validation part, after `step` updates."""

    def after_evaluation(self, record: EvaluationRecord) -> None:
        """Hook called after an evaluation."""

    def before_checkpoint(self, step: int) -> None:
        """Hook called before a checkpoint is saved, after `step` updates."""

    def after_staging(self, step: int) -> None:
        """Hook called when the state after `step` updates is copied and steps go on; with `checkpoint.async_save`."""

    def after_checkpoint(self, step: int, path: Path) -> None:
        """Hook called when a checkpoint is complete at `path`; some steps after `step` with `checkpoint.async_save`."""

    def after_stop(self, step: int, reason: str) -> None:
        """Hook called when a callback's `stop` has ended the run after `step` updates, before its last step."""

    def after_fit(self) -> None:
        """Hook called after the last step, or when a callback stopped the run; not after a failure or a signal."""

    def close(self) -> None:
        """Hook called when the run has ended, was stopped or failed."""

    def stop(self, reason: str) -> None:
        """End the run on all ranks, with a checkpoint; may be called on any rank, from any method.

        The ranks agree in the next collective that they make anyway, in every layout alike. A call during an
        evaluation, a checkpoint or the end of an epoch ends the run there; a call before or during a step ends it after
        that step; a call after a step ends it after the next one. The reason is printed, written to RUN/train.log and
        passed to `after_stop`; if several ranks give one, the lowest rank's is used.

        Args:
            reason: reason, on one line.
        """
        self._stop_reason = self._stop_reason or str(reason)


def stop_reason(callback: Callback) -> str | None:
    """Return the reason that a callback gave to `stop`; None if it has not called it."""
    return callback._stop_reason


def on_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


def say(line: str) -> None:
    """Print a line at once; a console that is closed or full does not end the run."""
    with suppress(OSError, OutputLost):
        print(line, flush=True)


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds, such as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def step_values(record: StepRecord) -> dict[str, float]:
    """Return the loggable values of a step by name.

    These are `loss`, `grad_norm`, `lr`, `tokens_per_second`, `epoch`, `loss_scale` with loss scaling, `seconds/PHASE`,
    `tflops` and `mfu` if known, `memory`, `largest_memory`, and `term/NAME` for each term of a loss of several; only
    `lr` and `epoch` if its samples were not read.
    """
    if not record.is_read:
        return {"lr": record.lr, "epoch": record.epoch}
    values: dict[str, float] = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "tokens_per_second": record.tokens_per_second,
        "epoch": record.epoch,
    }
    if record.loss_scale is not None:
        values["loss_scale"] = record.loss_scale
    values |= {f"seconds/{phase}": seconds for phase, seconds in record.phases.items()}
    if (used := record.performance) is not None:
        if used.flops_per_second is not None:
            values["tflops"] = used.flops_per_second / 1e12
        if used.mfu is not None:
            values["mfu"] = used.mfu
        values |= {"memory": used.memory, "largest_memory": used.largest_memory}
    return values | {f"term/{name}": mean for name, mean in record.terms.items()}


def evaluation_values(record: EvaluationRecord) -> dict[str, float]:
    """Return `valid_loss`, `valid_loss/NAME` of each corpus of a mixture, and `valid_term/NAME` of several terms."""
    values = {"valid_loss": record.loss}
    values |= {f"valid_loss/{name}": loss for name, loss in record.corpus_losses.items()}
    return values | {f"valid_term/{name}": mean for name, mean in record.terms.items()}


class WriteFailures:
    """Context that reports the first `OSError` of the writes to a file, and lets the run go on without it."""

    def __init__(self, path: Path) -> None:
        self.path, self._reported = path, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, OSError):
            return False
        if not self._reported:
            self._reported = True
            say(f"Warning: {self.path} cannot be written ({error.strerror}); training continues without it.")
        return True


def reason_of(error: Exception) -> str:
    """Return an exception's message on one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())
