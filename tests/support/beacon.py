"""Training callback that reports each rank's progress to another process, which can kill ranks at chosen moments."""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from threefold.train.callbacks.base import Callback, RunContext
from threefold.train.callbacks.records import EvaluationRecord, StepRecord


class Beacon(Callback):
    """Append `PROCESS KIND STEP` to the file `moments_RANK` of `folder` at each moment of a rank's run.

    Kinds at a beginning: start, step, evaluation, save. At an end: made, evaluated, saved, and staged, after which a
    save continues in the background.
    """

    ranks: ClassVar[Literal["first", "all"]] = "all"

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def setup(self, run: RunContext) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self.folder / f"moments_{run.mesh.rank}", flags, 0o644)

    def before_fit(self, start: int) -> None:
        self._tell("start", start)

    def before_step(self, step: int, batch: Any) -> None:
        self._tell("step", step)

    def after_step(self, record: StepRecord) -> None:
        self._tell("made", record.step)

    def before_evaluation(self, step: int) -> None:
        self._tell("evaluation", step)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self._tell("evaluated", record.step)

    def before_checkpoint(self, step: int) -> None:
        self._tell("save", step)

    def after_staging(self, step: int) -> None:
        self._tell("staged", step)

    def after_checkpoint(self, step: int, path: Path) -> None:
        self._tell("saved", step)

    def _tell(self, kind: str, step: int) -> None:
        os.write(self._file, f"{os.getpid()} {kind} {step}\n".encode())
