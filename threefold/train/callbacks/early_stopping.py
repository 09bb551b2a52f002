"""Early stopping: ends a run when a monitored value stops improving."""

from math import inf, isfinite
from typing import Literal

from threefold.errors import UserError
from threefold.plugins import one_of
from threefold.train.callbacks.base import (
    Callback,
    EvaluationRecord,
    RunContext,
    StepRecord,
    evaluation_values,
    step_values,
)
from threefold.train.callbacks.metrics import FILE as METRICS_FILE
from threefold.train.callbacks.metrics import read_metrics

_OF_STEPS = ("loss", "grad_norm")


class EarlyStopping(Callback):
    """Stop a run when `monitor` has not improved in `patience` measurements in a row.

    A resumed run continues to count: it reads the measurements up to its start from RUN/metrics.jsonl.

    Args:
        monitor: `valid_loss`, measured by each evaluation; `valid_loss/NAME` for a corpus of a mixture; or `loss` or
            `grad_norm`, measured in each step.
        patience: number of measurements without improvement after which the run stops.
        min_delta: smallest change that counts as an improvement.
        mode: `min` if lower is better, `max` if higher is.

    Attributes:
        best: best value so far; infinite before the first measurement.
        waited: measurements since then.

    Raises:
        UserError: an argument has another value.

    Example:
        >>> stopping = EarlyStopping("valid_loss", patience=3, min_delta=0.01)
    """

    def __init__(
        self,
        monitor: str = "valid_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if monitor not in ("valid_loss", *_OF_STEPS) and not monitor.startswith("valid_loss/"):
            raise _refused("monitor", monitor, one_of(monitor, ["valid_loss", *_OF_STEPS]))
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise _refused("patience", patience, "a whole number of at least 1; use 3")
        if isinstance(min_delta, bool) or not isinstance(min_delta, int | float) or not 0 <= min_delta < inf:
            raise _refused("min_delta", min_delta, "a number of at least 0; use 0.0")
        if mode not in ("min", "max"):
            raise _refused("mode", mode, one_of(mode, ["min", "max"]))
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode
        self.best = inf if mode == "min" else -inf
        self.waited = 0

    def setup(self, run: RunContext) -> None:
        if self.monitor not in _OF_STEPS and not run.config.train.evaluates:
            raise UserError(
                f"EarlyStopping has the monitor {self.monitor} but train.eval_every is 0, so that it is never "
                "measured; use train.eval_every 100, or the monitor loss."
            )
        self._metrics = run.run_dir / METRICS_FILE

    def before_fit(self, start: int) -> None:
        if start:
            name = self.monitor.partition("/")[2]
            for line in read_metrics(self._metrics):
                value = line.get("valid_losses", {}).get(name) if name else line.get(self.monitor)
                if line["step"] <= start and value is not None:
                    self._measure(value)
            self.waited = min(self.waited, self.patience - 1)  # it was resumed to go on

    def after_step(self, record: StepRecord) -> None:
        if self.monitor in _OF_STEPS and not record.skipped:
            self._check(step_values(record)[self.monitor])

    def after_evaluation(self, record: EvaluationRecord) -> None:
        if self.monitor in _OF_STEPS:
            return
        values = evaluation_values(record)
        if self.monitor not in values:
            raise UserError(
                f"EarlyStopping has the monitor {self.monitor} but the validation part has "
                f"{one_of(self.monitor, list(values))}."
            )
        self._check(values[self.monitor])

    def _check(self, value: float) -> None:
        self._measure(value)
        if self.waited >= self.patience:
            times = "time" if self.waited == 1 else "times in a row"
            self.stop(f"{self.monitor} has not improved on {self.best:.6g} {self.waited} {times}")

    def _measure(self, value: float) -> None:
        gain = self.best - value if self.mode == "min" else value - self.best
        if isfinite(value) and gain > self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1


def _refused(argument: str, value: object, rule: str) -> UserError:
    return UserError(f"EarlyStopping has {argument} {value!r} but it must be {rule}.")
