"""RUN/metrics.csv: the metrics of every step and evaluation as a table."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.console import say
from threefold.train.callbacks.line_file import LineFile
from threefold.train.callbacks.values import evaluation_values, step_values

_STEP = ("loss", "grad_norm", "lr", "tokens_per_second", "epoch", "loss_scale", "tokens", "seconds", "skipped")
COLUMNS = ("step", *_STEP, "valid_loss", "valid_tokens")


class CSVLog(Callback):
    """Writes a row for each step and one for each evaluation, whose other columns are empty.

    A loss of several terms adds columns `term/NAME` and `valid_term/NAME`. A resumed run appends, without the rows
    after its start. A failure to write is reported once.

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
        """Begin the file anew, with the rows whose `key` is at most `start`, and the columns that `extend` added."""
        kept = self._rows(start) if start else []
        self._begin(kept)

    def extend(self, columns: Sequence[str]) -> None:
        """Have these columns too; in the rows so far they are empty."""
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
        """The rows of the existing file up to `last`; none where it has other columns, but for those of terms."""
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
