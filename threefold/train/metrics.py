"""RUN/metrics.jsonl: every step and every evaluation as one JSON object a line."""

import json
import os
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from threefold.train.hooks import EvaluationRecord, Hook, StepRecord

FILE = "metrics.jsonl"


class MetricsFile(Hook):
    """Writes the file; a resumed run goes on with it, without what lies behind the step that it goes on from.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def before_fit(self, start: int) -> None:
        kept = [line for line in read_metrics(self.path) if line["step"] <= start] if start else []
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(fresh, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def after_step(self, record: StepRecord) -> None:
        values: dict[str, Any] = {
            "step": record.step,
            "loss": _number(record.loss),
            "grad_norm": _number(record.grad_norm),
            "lr": record.lr,
            "tokens": record.tokens,
            "tokens_per_second": round(record.tokens_per_second, 1),
        }
        if record.loss_scale is not None:
            values |= {"loss_scale": record.loss_scale, "skipped": record.skipped}
        if record.corpus_epochs:
            values["epochs"] = {name: round(epochs, 6) for name, epochs in record.corpus_epochs.items()}
        self._write(values)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        values: dict[str, Any] = {"step": record.step, "valid_loss": record.loss, "valid_tokens": record.tokens}
        if record.corpus_losses:
            values["valid_losses"] = dict(record.corpus_losses)
        self._write(values)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()


def _number(value: float) -> float | None:
    """JSON has no numbers that are not finite."""
    return value if isfinite(value) else None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a metrics file that may be missing, or end in the middle of a line."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return
