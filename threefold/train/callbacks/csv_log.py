"""RUN/metrics.csv: the metrics of every step and evaluation as a table."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.console import say
from threefold.train.callbacks.line_file import LineFile
from threefold.train.callbacks.values import step_values

_STEP = ("loss", "grad_norm", "lr", "tokens_per_second", "epoch", "loss_scale", "tokens", "seconds", "skipped")
COLUMNS = ("step", *_STEP, "valid_loss", "valid_tokens")


class CSVLog(Callback):
    """Writes a row for each step and one for each evaluation, whose other columns are empty.

    A resumed run appends, without the rows after its start. A failure to write is reported once.

    Args:
        path: of the file; a relative one is in the run's folder.
    """

    def __init__(self, path: str | Path = "metrics.csv") -> None:
        self.path = Path(path)
        self._table: Table | None = None

    def setup(self, run: RunContext) -> None:
        self._table = Table(run.run_dir / self.path, COLUMNS, "step", say)

    def before_fit(self, start: int) -> None:
        if self._table is not None:
            self._table.open(start)

    def after_step(self, record: StepRecord) -> None:
        values = {**step_values(record), "step": record.step, "tokens": record.tokens, "seconds": record.seconds}
        self._write({**values, "skipped": int(record.skipped)})

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._write({"step": record.step, "valid_loss": record.loss, "valid_tokens": record.tokens})

    def close(self) -> None:
        if self._table is not None:
            self._table.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._table is not None:
            self._table.write(row)


class Table:
    """A CSV file with a header, written row by row.

    Args:
        path: of the file.
        columns: names, of which a row may lack some.
        key: the column of whole numbers by which rows of a resumed run are kept.
        say: prints the warning about a failure.
    """

    def __init__(self, path: Path, columns: Sequence[str], key: str, say: Callable[[str], None]) -> None:
        self.path, self.columns, self.key = path, tuple(columns), key
        self._file = LineFile(path, say)

    def open(self, start: int) -> None:
        """Begin the file anew, with the rows whose `key` is at most `start`."""
        kept = self._rows(start) if start else []
        self._file.open(append=False)
        self._file.write(_line(self.columns))
        for row in kept:
            self.write(row)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        self._file.write(_line([row.get(column, "") for column in self.columns]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rows(self, last: int) -> list[dict[str, str]]:
        """The rows of the existing file up to `last`; none where it has other columns."""
        try:
            with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
                reader = csv.DictReader(file)
                rows = list(reader) if tuple(reader.fieldnames or ()) == self.columns else []
        except (OSError, csv.Error):
            return []
        whole = [row for row in rows if None not in row.values() and (row[self.key] or "").isdecimal()]
        return [row for row in whole if int(row[self.key]) <= last]


def _line(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().removesuffix("\n")
