"""RUN/metrics.csv and RUN/epochs.csv: the metrics of every step, evaluation and epoch as tables."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from threefold.train.callbacks.base import (
    Callback,
    EvaluationRecord,
    LineFile,
    RunContext,
    StepRecord,
    evaluation_values,
    on_terminal,
    say,
    step_values,
)

_STEP = ("loss", "grad_norm", "lr", "tokens_per_second", "epoch", "loss_scale", "tokens", "seconds", "skipped")
COLUMNS = ("step", *_STEP, "valid_loss", "valid_tokens")


class CSVLog(Callback):
    """Write one row per step, and one per evaluation, whose other columns are empty.

    A loss of several terms adds columns `term/NAME` and `valid_term/NAME`. A resumed run drops the rows after its start
    and appends. A failure to write is reported once.

    Args:
        path: path of the file; a relative one is in the run's folder.
    """

    def __init__(self, path: str | Path = "metrics.csv") -> None:
        self.path = Path(path)
        self._table: Table | None = None

    def setup(self, run: RunContext) -> None:
        self._table = Table(run.run_dir / self.path, COLUMNS, "step", say)

    def before_fit(self, start: int) -> None:
        if self._table is not None:
            self._table.open(start)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        if self._table is not None:
            self._table.close()
            self._table.open(start)

    def after_step(self, record: StepRecord) -> None:
        values = {**step_values(record), "step": record.step, "tokens": record.tokens, "seconds": record.seconds}
        self._write({**values, "skipped": int(record.skipped)})

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._write({**evaluation_values(record), "step": record.step, "valid_tokens": record.tokens})

    def close(self) -> None:
        if self._table is not None:
            self._table.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._table is not None:
            self._table.extend([column for column in row if column.startswith(("term/", "valid_term/"))])
            self._table.write(row)


class Table:
    """CSV file with a header, written row by row; a resumed run keeps rows by the whole number in column `key`."""

    def __init__(self, path: Path, columns: Sequence[str], key: str, say: Callable[[str], None]) -> None:
        self.path, self.columns, self.key = path, tuple(columns), key
        self._file = LineFile(path, say)

    def open(self, start: int) -> None:
        """Rewrite the file with the rows whose `key` is at most `start`, and with the columns that `extend` added."""
        kept = self._rows(start) if start else []
        self._begin(kept)

    def extend(self, columns: Sequence[str]) -> None:
        """Add columns, which are empty in the rows so far."""
        new = tuple(column for column in columns if column not in self.columns)
        if new:
            rows = self._rows()
            self.columns += new
            self.close()
            self._begin(rows)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        self._file.write(_line([row.get(column, "") for column in self.columns]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._file.open(append=False)
        self._file.write(_line(self.columns))
        for row in rows:
            self.write(row)

    def _rows(self, last: float = inf) -> list[dict[str, str]]:
        """Return the rows of the existing file up to `last`; none if it has other columns, except those of terms."""
        try:
            with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
                reader = csv.DictReader(file)
                found, own = tuple(reader.fieldnames or ()), len(self.columns)
                if found[:own] != self.columns or any("term/" not in column for column in found[own:]):
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


@dataclass
class EpochRecord:
    """Results of an epoch's steps, as far as this process made them.

    Attributes:
        epoch: 0 for the first.
        first_step, last_step: range of these steps.
        loss: mean over the tokens of these steps that were trained on.
        valid_loss: loss of the last evaluation after one of these steps; None without one.
        tokens: number of tokens trained on; number of samples for a data set whose samples are not tokens.
        seconds: duration of the steps.
        terms: for a loss of several terms, the mean of each by name, over the steps in which it counts something,
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
        """Add a step."""
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
    values = {name: value for name, value in asdict(record).items() if name not in ("terms", "_weights")}
    return values | {f"term/{name}": mean for name, mean in record.terms.items()}
