"""RUN/epochs.csv: losses, tokens and seconds of each pass over the training samples."""

from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.console import on_terminal, say
from threefold.train.callbacks.csv_log import Table


@dataclass
class EpochRecord:
    """What the steps of an epoch gave, those that this process made.

    Attributes:
        epoch: 0 for the first.
        first_step, last_step: of these steps.
        loss: mean over their tokens that were trained on.
        valid_loss: of the last evaluation after one of them; None without.
        tokens: that were trained on; samples where a data set has other samples than tokens.
        seconds: of the steps.
        terms: of a loss of several terms, the mean of each by name, over the steps in which it counts something,
            weighted by their tokens.
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
        """Count a step."""
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


class EpochMetrics(Callback):
    """Writes a row for each epoch, when it and the evaluation at its end are over; the last may be incomplete.

    A step belongs to the epoch in which it begins. A resumed run appends, without the rows after its start; where it
    starts within an epoch, the row of that epoch has the steps from there on. A loss of several terms adds a column
    `term/NAME` for each.

    Args:
        path: of the file; a relative one is in the run's folder.

    Attributes:
        epochs: the records so far.
    """

    def __init__(self, path: str | Path = "epochs.csv") -> None:
        self.path = Path(path)
        self.epochs: list[EpochRecord] = []
        self._current: EpochRecord | None = None
        self._table: Table | None = None

    def setup(self, run: RunContext) -> None:
        columns = tuple(_values(EpochRecord(0, 0, 0)))
        self._table = Table(run.run_dir / self.path, columns, "last_step", say)

    def before_fit(self, start: int) -> None:
        if self._table is not None:
            self._table.open(start)

    def before_epoch(self, epoch: int) -> None:
        self._finish()

    def after_step(self, record: StepRecord) -> None:
        if self._current is None:
            self._current = EpochRecord(record.epoch, record.step, record.step)
        self._current.add(record)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        self.epochs = [epoch for epoch in self.epochs if epoch.last_step <= start]
        self._current = None
        if self._table is not None:
            self._table.close()
            self._table.open(start)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        if self._current is not None:
            self._current.valid_loss = record.loss

    def after_fit(self) -> None:
        self._finish()

    def close(self) -> None:
        self._finish()
        if self._table is not None:
            self._table.close()

    def _finish(self) -> None:
        found, self._current = self._current, None
        if found is None:
            return
        self.epochs.append(found)
        if self._table is not None:
            values = _values(found)
            self._table.extend(list(values))
            self._table.write({key: "" if value is None else value for key, value in values.items()})
        if not on_terminal():
            valid = "" if found.valid_loss is None else f", validation loss: {found.valid_loss:.9f}"
            say(
                f"epoch {found.epoch}, steps: {found.first_step} to {found.last_step}, loss: {found.loss:.9f}{valid}, "
                f"tokens: {found.tokens}, time: {found.seconds:.2f} sec"
                + "".join(f", {name}: {mean:.9f}" for name, mean in found.terms.items())
            )


def _values(record: EpochRecord) -> dict[str, Any]:
    """The columns of a record and their values."""
    values = {name: value for name, value in asdict(record).items() if name not in ("terms", "_weights")}
    return values | {f"term/{name}": mean for name, mean in record.terms.items()}
