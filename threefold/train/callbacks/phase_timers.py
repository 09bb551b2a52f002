"""RUN/phases.json: how the time of a run is divided among the phases of its steps, evaluations and checkpoints."""

import json
import time
from pathlib import Path

from threefold.output.links import replace_link
from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord
from threefold.train.callbacks.console import say
from threefold.train.callbacks.line_file import reason_of


class PhaseTimers(Callback):
    """Adds up the seconds of each phase on rank 0, and writes and prints them at the end.

    The phases of a step are `data` (waiting for the batch), `callbacks` (their `before_step`), `forward_backward` (with
    the gradients' synchronisation) and `update` (with the exchange of loss and gradient norm); beside them are
    `evaluation` and `checkpoint`, of an asynchronous save what the steps wait for. On a GPU the forward and backward
    passes show in `update`, which waits for them.

    Args:
        path: of the file; a relative one is in the run's folder.

    Attributes:
        seconds: by phase.
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
        self._saved()

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._saved()

    def _saved(self) -> None:
        if self._saving is not None:
            self.seconds["checkpoint"] += time.perf_counter() - self._saving
            self._saving = None

    def after_fit(self) -> None:
        total = sum(self.seconds.values()) or 1.0
        parts = (f"{phase} {seconds:.2f} s ({seconds / total:.0%})" for phase, seconds in self.seconds.items())
        say(f"Phases: {', '.join(parts)}.")

    def close(self) -> None:
        try:
            replace_link(self.path).write_text(json.dumps(self.seconds, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            say(f"Warning: {self.path} cannot be written ({reason_of(error)}).")
