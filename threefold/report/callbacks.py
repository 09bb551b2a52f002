"""Callbacks that `train.callbacks` names: early stopping, CSV files, epochs, phase timers, and experiment trackers."""

import csv
import inspect
import io
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, Literal

from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles, write_nofollow
from threefold.plugins import one_of
from threefold.report.door import METRICS_FILE
from threefold.report.metrics import RunFile, read_metrics
from threefold.report.tensorboard import Tracker, evaluation_values, step_values
from threefold.train.callbacks.base import Callback, RunContext, on_terminal, reason_of, say
from threefold.train.callbacks.records import EvaluationRecord, StepRecord
from threefold.train.callbacks.step_log import LineFile

_OF_STEPS = ("loss", "grad_norm")


class EarlyStopping(Callback):
    """Stop a run when `monitor` has not improved in `patience` measurements in a row.

    A resumed run continues to count: it reads the measurements up to its start from RUN/metrics.jsonl.

    Args:
        monitor: `valid_loss`, measured by each evaluation; `valid_loss/NAME` for a corpus of a mixture;
            `valid_loss_average` for averaged weights; or `loss` or `grad_norm`, measured in each step.
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
        known = ["valid_loss", "valid_loss_average", *_OF_STEPS]
        if monitor not in known and not monitor.startswith("valid_loss/"):
            raise _refused("monitor", monitor, one_of(monitor, known))
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


class Table(RunFile):
    """CSV file with a header; a resumed run keeps rows by the whole number in column `key`.

    Columns `term/NAME`, `valid_term/NAME` and `valid_loss_average` are added when a row has them, and are empty in the
    rows so far.
    """

    def __init__(self, path: str | Path, columns: Sequence[str], key: str) -> None:
        super().__init__(path)
        self.columns, self.key = tuple(columns), key

    def setup(self, run: RunContext) -> None:
        self.path = run.run_dir / self.path
        self.file = LineFile(self.path)

    def before_fit(self, start: int) -> None:
        self._begin(self._rows(start) if start else [])

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; columns that it lacks are empty."""
        terms = (column for column in row if column.startswith(("term/", "valid_term/", "valid_loss_average")))
        if new := tuple(column for column in terms if column not in self.columns):
            rows = self._rows()
            self.columns += new
            self.file.close()
            self._begin(rows)
        self.file.write(_line([row.get(column, "") for column in self.columns]))

    def _begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.file.open(append=False)
        self.file.write(_line(self.columns))
        for row in rows:
            self.write(row)

    def _rows(self, last: float = inf) -> list[dict[str, str]]:
        """Return the rows of the existing file up to `last`; none if it has other columns, except those of terms."""
        try:
            record = FolderFiles(self.path.parent).record(self.path.name)
            with io.TextIOWrapper(record, encoding="utf-8", errors="replace", newline="") as file:
                reader = csv.DictReader(file)
                found, count = tuple(reader.fieldnames or ()), len(self.columns)
                if found[:count] != self.columns or any("term/" not in column for column in found[count:]):
                    return []
                rows, self.columns = list(reader), found
        except (OSError, csv.Error):
            return []
        whole = [row for row in rows if None not in row.values() and (row[self.key] or "").isdecimal()]
        return [row for row in whole if int(row[self.key]) <= last]


def _line(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().removesuffix("\n")


_OF_STEP = ("loss", "grad_norm", "lr", "tokens_per_second", "epoch", "loss_scale", "tokens", "seconds", "skipped")


class CSVLog(Table):
    """Write one row per step, and one per evaluation, whose other columns are empty.

    A loss of several terms adds columns `term/NAME` and `valid_term/NAME`, averaged weights `valid_loss_average`. A
    resumed run drops the rows after its start and appends. A failure to write is reported once.

    Args:
        path: path of the file; a relative one is in the run's folder.
    """

    def __init__(self, path: str | Path = "metrics.csv") -> None:
        super().__init__(path, ("step", *_OF_STEP, "valid_loss", "valid_tokens"), "step")

    def after_step(self, record: StepRecord) -> None:
        values = {**step_values(record), "step": record.step, "tokens": record.tokens, "seconds": record.seconds}
        self.write({**values, "skipped": int(record.skipped)})

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.write({**evaluation_values(record), "step": record.step, "valid_tokens": record.tokens})


@dataclass
class EpochRecord:
    """Results of an epoch's steps, as far as this process made them.

    The loss, and each of the `terms` over the steps in which it counts something, are means over the `tokens` that were
    trained on (samples for a data set whose samples are not tokens). `valid_loss` is that of the last evaluation after
    one of these steps.
    """

    epoch: int
    first_step: int
    last_step: int
    loss: float = 0.0
    valid_loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def add(self, record: StepRecord) -> None:
        self.last_step = record.step
        self.seconds += record.seconds
        if not record.skipped and record.tokens:
            self.tokens += record.tokens
            self.loss += (record.loss - self.loss) * record.tokens / self.tokens
            for name, mean in record.terms.items():
                if isfinite(mean):
                    weight = self._weights[name] = self._weights.get(name, 0) + record.tokens
                    before = self.terms.setdefault(name, 0.0)
                    self.terms[name] += (mean - before) * record.tokens / weight


class EpochMetrics(Table):
    """Write one row per epoch, after the evaluation at its end; the last epoch may be incomplete.

    A step belongs to the epoch in which it begins. A resumed run drops the rows after its start and appends; if it
    starts within an epoch, that epoch's row covers the steps from there on. A loss of several terms adds a column
    `term/NAME` for each.

    Args:
        path: path of the file; a relative one is in the run's folder.

    Attributes:
        epochs: records so far.
    """

    def __init__(self, path: str | Path = "epochs.csv") -> None:
        super().__init__(path, tuple(_values(EpochRecord(0, 0, 0))), "last_step")
        self.epochs: list[EpochRecord] = []
        self._current: EpochRecord | None = None

    def before_epoch(self, epoch: int) -> None:
        self._finish()

    def after_step(self, record: StepRecord) -> None:
        if self._current is None:
            self._current = EpochRecord(record.epoch, record.step, record.step)
        self._current.add(record)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self.epochs = [epoch for epoch in self.epochs if epoch.last_step <= start]
        self._current = None
        super().after_rollback(step, start, reason)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        if self._current is not None:
            self._current.valid_loss = record.loss

    def after_fit(self) -> None:
        self._finish()

    def close(self) -> None:
        self._finish()
        super().close()

    def _finish(self) -> None:
        found, self._current = self._current, None
        if found is None:
            return
        self.epochs.append(found)
        self.write({key: "" if value is None else value for key, value in _values(found).items()})
        if not on_terminal():
            valid = "" if found.valid_loss is None else f", validation loss: {found.valid_loss:.9f}"
            say(
                f"epoch {found.epoch}, steps: {found.first_step} to {found.last_step}, loss: {found.loss:.9f}{valid}, "
                f"tokens: {found.tokens}, time: {found.seconds:.2f} sec"
                + "".join(f", {name}: {mean:.9f}" for name, mean in found.terms.items())
            )


def _values(record: EpochRecord) -> dict[str, Any]:
    values = {name: value for name, value in asdict(record).items() if name not in ("terms", "_weights")}
    return values | {f"term/{name}": mean for name, mean in record.terms.items()}


class PhaseTimers(Callback):
    """Sum the seconds of each phase on rank 0, and write and print them at the end.

    The phases of a step are `data` (waiting for the batch), `callbacks` (their `before_step`), `forward_backward` (with
    gradient synchronization) and `update` (with the exchange of loss and gradient norm); further phases are
    `evaluation` and `checkpoint`, for an asynchronous save only the time that steps wait. On a GPU the forward and
    backward passes show in `update`, which waits for them.

    Args:
        path: path of the file; a relative one is in the run's folder.

    Attributes:
        seconds: seconds by phase.
    """

    def __init__(self, path: str | Path = "phases.json") -> None:
        self.path = Path(path)
        phases = ("data", "callbacks", "forward_backward", "update", "evaluation", "checkpoint")
        self.seconds = dict.fromkeys(phases, 0.0)
        self._saving: float | None = None

    def setup(self, run: RunContext) -> None:
        self.path = run.run_dir / self.path

    def after_step(self, record: StepRecord) -> None:
        for phase, seconds in record.phases.items():
            self.seconds[phase] += seconds

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.seconds["evaluation"] += record.seconds

    def before_checkpoint(self, step: int) -> None:
        self._saving = time.perf_counter()

    def after_staging(self, step: int) -> None:
        if self._saving is not None:
            self.seconds["checkpoint"] += time.perf_counter() - self._saving
            self._saving = None

    def after_checkpoint(self, step: int, path: Path) -> None:
        self.after_staging(step)

    def after_fit(self) -> None:
        total = sum(self.seconds.values()) or 1.0
        parts = (f"{phase} {seconds:.2f} s ({seconds / total:.0%})" for phase, seconds in self.seconds.items())
        say(f"Phases: {', '.join(parts)}.")

    def close(self) -> None:
        try:
            write_nofollow(self.path, json.dumps(self.seconds, indent=1) + "\n")
        except OSError as error:
            say(f"Warning: {self.path} cannot be written ({reason_of(error)}).")


_MODES: Final = ("online", "offline", "disabled", "shared")
"""Modes of `wandb.init`."""
_PATIENCE_WITH_MLFLOW: Final = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Seconds and retries of a request, for which the training waits; by default MLflow tries for minutes."""
_LONGEST_PARAMETER = 500  # maximum number of characters of a parameter's value in every version of MLflow


class MLflowRun(Tracker):
    """Log steps, evaluations and the config to MLflow; `pip install threefold[mlflow]`.

    A failure is reported once, and training continues without MLflow, after 10 seconds and one further try if a server
    does not answer (`MLFLOW_HTTP_REQUEST_TIMEOUT`, `MLFLOW_HTTP_REQUEST_MAX_RETRIES`). What can be tried without a
    server is tried before any rank starts. A resumed run becomes a new MLflow run unless `run_id` is given.

    Args:
        experiment: MLflow experiment; created if it does not exist.
        run_name: name of the MLflow run; None for the name of the run's folder.
        tracking_uri: a server or `sqlite:///FILE`; None for the environment's setting, or else MLflow's own, such as
            `mlflow.db` in the working folder.
        run_id: MLflow run to append to.
    """

    service, packages = "MLflow cannot log", ("mlflow",)

    def __init__(
        self,
        experiment: str = "threefold",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self.experiment, self.run_name, self.tracking_uri, self.run_id = experiment, run_name, tracking_uri, run_id
        self._status = "FAILED"

    def try_out(self) -> None:
        """Open a store of files or of a local database; a server is asked when the run begins."""
        from mlflow.tracking import MlflowClient, get_tracking_uri

        try:
            address = self.tracking_uri or get_tracking_uri()
            client = MlflowClient(tracking_uri=self.tracking_uri)
            if not address.startswith(("http:", "https:", "databricks")):
                client.get_experiment_by_name(self.experiment)
        except Exception as error:
            reason = reason_of(error).split(". ")[0].rstrip(".")
            raise UserError(
                f"train.callbacks has mlflow, which cannot log ({reason}); give it the tracking_uri of a server or "
                "sqlite:///FILE, with what `pip install threefold[mlflow]` installs, or leave it out."
            ) from error

    def setup(self, run: RunContext) -> None:
        with self.failures_reported():
            self._begin(run)

    def _begin(self, run: RunContext) -> None:
        # Use the client, as `mlflow.start_run` sets the active run of the whole process.
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for name, value in _PATIENCE_WITH_MLFLOW.items():
            os.environ.setdefault(name, value)  # it takes these settings in no other way, at each request
        self.connection = MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is None:
            found = self.connection.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else self.connection.create_experiment(self.experiment)
            self.run_id = self.connection.create_run(experiment, run_name=self.run_name or run.run_dir.name).info.run_id
            parameters = [
                Param(f"{section}.{key}", str(value)[:_LONGEST_PARAMETER])
                for section, keys in run.config.sections().items()
                for key, value in keys.items()
            ]
            self.connection.log_batch(self.run_id, params=parameters)

    def after_stop(self, step: int, reason: str) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self.connection.set_tag(self.run_id, "stopped", reason)

    def after_fit(self) -> None:
        self._status = "FINISHED"

    def close(self) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self.connection.set_terminated(self.run_id, self._status)
            self.connection = None

    def send(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        # Only letters, digits, and _ - . are valid everywhere; a slash makes a folder in a file store.
        names = (re.sub(r"[^\w\-.]", "_", key.replace("/", ".", 1)) for key in values)
        metrics = [Metric(name, value, now, step) for name, value in zip(names, values.values(), strict=True)]
        self.connection.log_batch(self.run_id, metrics=metrics)


class WeightsAndBiases(Tracker):
    """Log steps, evaluations and the config to Weights & Biases; `pip install threefold[wandb]`.

    A failure is reported once, and training continues without it. A resumed run becomes a new W&B run unless `id` and
    `resume` are given.

    Args:
        project: W&B project.
        run_name: name of the W&B run; None for the name of the run's folder.
        mode: `online`, `offline` (files under RUN/wandb, for `wandb sync`) or `disabled`; None for the environment's
            setting.
        options: further arguments of `wandb.init`, such as `entity`, `tags`, `id` and `resume`.
    """

    service, packages = "Weights & Biases cannot log", ("wandb",)

    def __init__(
        self, project: str = "threefold", run_name: str | None = None, mode: str | None = None, **options: Any
    ) -> None:
        self.options = {"project": project, "name": run_name, "mode": mode, **options}

    def try_out(self) -> None:
        """Check the names of the arguments, and the mode."""
        import wandb

        taken = list(inspect.signature(wandb.init).parameters)
        if wrong := next((name for name in self.options if name not in taken), None):
            nearest = one_of(wrong, taken).rpartition(" ")[2]
            raise UserError(f"train.callbacks has wandb, which is given {shown(wrong)}; the nearest is {nearest}.")
        if (mode := self.options["mode"]) not in (None, *_MODES):
            raise UserError(
                f"train.callbacks has wandb with mode {shown(str(mode))}, but it must be one of {', '.join(_MODES)}."
            )

    def setup(self, run: RunContext) -> None:
        with self.failures_reported():
            import wandb

            given = {key: value for key, value in self.options.items() if value is not None}
            self.connection = wandb.init(
                **{"name": run.run_dir.name, "dir": str(run.run_dir), "config": run.config.sections(), **given}
            )

    def after_stop(self, step: int, reason: str) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self.connection.summary["stopped"] = reason

    def after_fit(self) -> None:
        self._finish(0)

    def close(self) -> None:
        self._finish(1)

    def send(self, step: int, values: dict[str, float]) -> None:
        self.connection.log(values, step=step)

    def _finish(self, status: int) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self.connection.finish(exit_code=status)
            self.connection = None
