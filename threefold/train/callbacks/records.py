"""Records of steps and evaluations, which the training loop passes to the callbacks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from threefold.errors import UserError
from threefold.files import shown

_OWN: Final = frozenset(
    (
        *("step", "loss", "grad_norm", "lr", "tokens", "tokens_read", "tokens_per_second", "seconds", "epoch"),
        *(
            "epochs",
            "batch",
            "loss_scale",
            "skipped",
            "reason",
            "tflops",
            "mfu",
            "memory",
            "largest_memory",
            "largest_rank",
        ),
        *("waited", "wall_clock", "valid_loss", "valid_tokens", "goodput"),
    )
)
_OWN_GROUPS: Final = ("seconds", "phases", "term", "terms", "loss", "valid_loss", "valid_term", "corpora")
"""Names of the values that a run logs by itself, and those before a slash."""


class Logged:
    """Base class of the records that callbacks log values with.

    Attributes:
        logged: values that callbacks have logged, by name.
    """

    step: int
    logged: dict[str, float]

    def log(self, name: str, value: Any) -> None:
        """Log a number beside the run's own values: in metrics.jsonl, TensorBoard, trackers and the report.

        The value of global rank 0 is written; a callback of all ranks that wants a sum or a mean over them reduces it
        before. A name such as `layers/gradient/blocks.0` puts values with the same beginning together.

        Args:
            name: name of the value, which neither the run nor another callback has for this step.
            value: number, or tensor with one element.

        Raises:
            UserError: the name is taken, or the value is not a number.
        """
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise UserError(f"record.log has the name {shown(str(name))}, but it must be text on one line.")
        if name in _OWN or ("/" in name and name.partition("/")[0] in _OWN_GROUPS):
            raise UserError(f"record.log has the name {shown(name)}, which the run itself logs; use own/{shown(name)}.")
        if name in self.logged:
            raise UserError(
                f"record.log has the name {shown(name)} twice at step {self.step:,}; give each value its own."
            )
        try:
            self.logged[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"record.log has {shown(name)} with a value of type {type(value).__name__}, but it must be a number, "
                "or a tensor with one element."
            ) from None


@dataclass(frozen=True)
class Performance:
    """Hardware use of a step.

    Attributes:
        flops_per_second: model FLOPs of the step per second and rank, averaged over the
            ranks; None for a custom model.
        mfu: fraction of a rank's peak rate that this is; None if the peak is not known.
        memory: peak memory of this rank in bytes: resident memory of its process on a CPU, memory reserved by torch on
            a GPU.
        largest_memory, largest_rank: peak memory of the rank that uses most, among those that this one hears of.
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
class StepRecord(Logged):
    """Record of a finished step, the same on every rank except for the times and what callbacks log.

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
        fingerprint: hash of all weights after the step, the same in every layout; None unless the run is exact.
        unknown_calls: in the first step of an exact run of a custom model, what its passes call without being known
            to be exact.
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
    fingerprint: str | None = None
    unknown_calls: tuple[str, ...] = ()
    logged: dict[str, float] = field(default_factory=dict)

    @property
    def is_read(self) -> bool:
        """Whether the samples of the step were read; False for a step skipped on purpose or by a rollback."""
        return self.tokens_read > 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens read per second, without padding."""
        return self.tokens_read / self.seconds if self.tokens_read else 0.0


@dataclass
class MeanRates:
    """Mean FLOP/s and MFU over several steps; `last` is the performance of the newest step."""

    seconds: float = 0.0
    flops: float = 0.0
    peak: float = 0.0
    last: Performance | None = None

    @classmethod
    def over(cls, steps: Iterable[StepRecord]) -> "MeanRates":
        rates = cls()
        for step in steps:
            rates.add(step.seconds, step.performance)
        return rates

    def add(self, seconds: float, step: Performance | None) -> None:
        """Add a step; a step without a performance does not count."""
        if step is None:
            return
        self.last = step
        self.seconds += seconds
        rate = step.flops_per_second or 0.0
        self.flops += rate * seconds
        self.peak += rate / step.mfu * seconds if step.mfu else 0.0

    @property
    def teraflops(self) -> float:
        """Model TFLOP/s per rank; 0 if not known."""
        return self.flops / self.seconds / 1e12 if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization; 0 if not known."""
        return self.flops / self.peak if self.peak else 0.0


@dataclass(frozen=True)
class EvaluationRecord(Logged):
    """Record of a finished evaluation.

    Attributes:
        step: updates made so far.
        loss: mean over the tokens whose label is not ignored; for a mixture, the weighted sum of the corpora's means.
        tokens: number of those tokens; number of samples for a data set whose samples are not tokens.
        seconds: duration of the evaluation.
        corpus_losses: for a mixture, the mean of each corpus by name.
        terms: for a loss of several terms, the mean of each by name; for a mixture, weighted like the loss.
        average_loss: loss of the moving average of the weights; None without one.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    corpus_losses: Mapping[str, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    average_loss: float | None = None
    logged: dict[str, float] = field(default_factory=dict)
