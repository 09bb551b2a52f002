"""Training callbacks: their base classes, the context of a run, and helpers to write callbacks."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from threefold.config import Config
from threefold.errors import OutputLost, UserError
from threefold.files import hide_secrets
from threefold.train.attempt import Attempt
from threefold.train.callbacks.records import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from torch import Tensor

    from threefold.comm.mesh import Mesh
    from threefold.train.model_view import ActivationWatch, ModelView
    from threefold.train.step import NonFiniteStep


@dataclass(frozen=True)
class RunContext:
    """Context of a callback's run, on each rank.

    Attributes:
        config: resolved config.
        run_dir: folder of the run, which exists.
        mesh: place of this rank in the layout, with the process groups of its axes.
        attempt: attempt of the run, as its launcher may restart the ranks.
        peak_rate: peak FLOP/s of a rank in the dtype of the config; None if not known.
        view: the model, from when it is made; `model` returns it.
    """

    config: Config
    run_dir: Path
    mesh: "Mesh"
    attempt: Attempt = field(default_factory=Attempt)
    peak_rate: float | None = None
    view: "ModelView | None" = None

    @property
    def model(self) -> "ModelView":
        """Model of the run, of which this rank has a part: `named_parameters()`, `gradients()` and `norms()`."""
        if self.view is None:
            raise UserError("The model of the run is not made yet; use run.model from the setup of a callback on.")
        return self.view

    def gradient_norms(self) -> dict[str, float]:
        """Return the norm of the gradient of each trained parameter, by its name in the whole model.

        Gradients of the last step, of the mean loss over the global batch, before clipping: the root of the sum of
        their squares is the step's `grad_norm`. Call it in `after_step`. They are equal on all ranks, and the same in
        every layout up to rounding. One collective over the world, so the callback needs `ranks = "all"`.
        """
        return self.model.gradient_norms()

    def activations(
        self, pattern: str, fn: "Callable[[str, Tensor, int], object]", *, inputs: bool = False
    ) -> "ActivationWatch":
        """Call `fn(name, tensor, step)` with what modules return in the forward passes of training steps.

        `fn` is called once for each call of a module and each micro-batch: not in evaluations, and not again when the
        backward pass recomputes. It may not change the tensor or call a collective, and a module that does not
        return a tensor is passed over. A rank sees its part: the samples of its replica, its positions with context
        parallelism, the layers of its stages; of a layer's output a share of the positions with sequence parallelism,
        else the same as the other tensor ranks; and inside a pair of split layers its own features. The last
        built-in layer returns the summed loss.

        Args:
            pattern: names of modules in the whole model, as in `blocks.*` or `blocks.*.mlp.up`.
            fn: called with the module's name, the tensor without its graph, and the step (1 for the first).
            inputs: whether `fn` gets the first argument of a module instead of what it returns.

        Returns:
            handle whose `remove()` ends the calls.

        Raises:
            UserError: no module matches, or `train.compile` is true.
        """
        return self.model.activations(pattern, fn, inputs)

    def of(self, callback: "Callback | type[Callback]") -> "RunContext":
        """Return the context of a callback, whose collectives are refused if it is on the first rank alone."""
        return self if self.view is None else replace(self, view=self.view.on_ranks(callback.ranks))


class CallbackFailed(UserError):
    """Error of a callback; the message names it, its rank and the exception, and the rank's log has the traceback."""


class Callback:
    """Base class of training callbacks: each method is called at its moment of the run, and does nothing by default.

    A callback reports. A built-in callback that also takes part in steps, and decides whether they count, is a `Guard`.

    Methods are called in this order: setup, before_fit; for each step before_epoch (if one begins), before_step,
    after_step, after_log (if a callback called `record.log`), after_epoch (if one is complete), before_evaluation and
    after_evaluation (if due), before_checkpoint, after_staging (of an asynchronous save) and after_checkpoint (if due);
    after_stop, if a callback ended the run; then after_fit, unless a failure or a signal ended the run; and close,
    always. A step skipped on purpose (`data.skip_steps`) has no before_step, and a step that leads to a rollback has
    after_rollback in place of after_step. At each moment, callbacks are called in order: first the built-in ones in the
    order of their table, then those of `train.callbacks`, then those given to `Trainer`, each as listed. An exception
    ends the run on all ranks, with one sentence that names the callback and its rank.

    Attributes:
        ranks: "first" if only global rank 0 has the callback, so that it is called once per run; "all" if every rank
            has one of its own. A callback that calls a collective must be on all ranks of the collective's group.
        packages: packages that must be importable, beyond those that Threefold installs.
        step_interval: before_step and after_step are called in each step whose number is a multiple of this; 0 for no
            step. A callback may change it at any time.
        stop_reason: reason that it gave to `stop`; None before.

    Example:
        >>> class StopAtLoss(threefold.Callback):
        ...     def after_step(self, record):
        ...         if record.loss < 2.0:
        ...             self.stop(f"the loss is {record.loss:.2f}")
    """

    ranks: ClassVar[Literal["first", "all"]] = "first"
    packages: ClassVar[tuple[str, ...]] = ()
    step_interval: int = 1
    stop_reason: str | None = None

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

    def after_log(self, record: StepRecord | EvaluationRecord) -> None:
        """Hook called after the `after_step` or `after_evaluation` of all callbacks if one logged a value.

        The values are in `record.logged`.
        """

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
        self.stop_reason = self.stop_reason or str(reason)


@dataclass(frozen=True)
class BadStep:
    """Step that made no update.

    Its loss or gradient norm is not finite (`error`), or a guard refused it (`refused`). `step` counts from 1. It has
    this replica's samples, this rank's term of the mean loss, and the state of the random streams before the step.
    """

    step: int
    refused: str
    error: "NonFiniteStep | None"
    batch: Any
    loss: "Tensor"
    streams: "Mapping[str, Tensor]"


class Response(NamedTuple):
    """Response to a bad step, and its reason.

    `start` are the updates of the checkpoint that was loaded; None if the step is only skipped.
    """

    reason: str
    start: int | None = None


class Guard(Callback):
    """Callback of all ranks that also takes part in the steps themselves, and decides whether they count.

    Each method is called at its moment, on all ranks alike; the defaults do nothing. In a step these are, in order:
    skipped_for, before_forward, before_update, refuses, and after_update. If no update was made, after_divergence
    (unless a guard refused it) and respond follow instead. Exceptions pass unchanged.
    """

    ranks: ClassVar[Literal["first", "all"]] = "all"
    checks_state: bool = False
    """Whether `check_state` is to be called before a save."""

    def skipped_for(self, step: int) -> str:
        """Return why a step (1 for the first) is skipped without reading its samples; empty if it is not."""
        return ""

    def next_step(self, step: int) -> int:
        """Return the first step from `step` on that is not skipped."""
        return step

    def before_forward(self, step: int) -> None:
        """Hook called when the samples are read and all callbacks have had their `before_step`."""

    def before_update(self, step: int) -> None:
        """Hook called between the computation of the gradients and the update."""

    def refuses(self, loss: float, norm: float) -> str:
        """Return why a step with this loss and gradient norm, both finite, must not update; empty to update."""
        return ""

    def after_update(self, step: int) -> None:
        """Hook called after the update, or a skipped one."""

    def after_divergence(self, step: int) -> None:
        """Hook called after `step` updates, when the next one was not made, as loss or norm are not finite."""

    def respond(self, bad: BadStep) -> Response | None:
        """Skip a bad step, go back to a checkpoint, or raise; None leaves it to the next guard."""
        return None

    def check_state(self, step: int) -> Response | None:
        """Go back to a checkpoint if the state after `step` updates must not be saved."""
        return None

    def before_save(self, step: int) -> None:
        """Hook called before the `before_checkpoint` of the callbacks."""


def on_terminal() -> bool:
    """Return whether standard output is a terminal that can redraw a line, which a dumb one cannot."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def say(line: str) -> None:
    """Print a line at once; a console that is closed or full does not end the run."""
    with suppress(OSError, OutputLost):
        print(line, flush=True)


class FailureWarning:
    """Warning printed when something begins to fail, ending with its `consequence`; again only after a success."""

    def __init__(self, prints: bool, consequence: str) -> None:
        self._prints, self._consequence, self._failing = prints, consequence, False

    def failed(self, sentence: str) -> None:
        if self._prints and not self._failing:
            say(f"Warning: {sentence.removesuffix('.')}; {self._consequence}.")
        self._failing = True

    def worked(self) -> None:
        self._failing = False


def reason_of(error: Exception) -> str:
    """Return an exception's message on one line, without secrets."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return hide_secrets(" ".join(text.split()))
