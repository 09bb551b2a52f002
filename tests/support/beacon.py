"""A training callback that tells another process how far each rank is, so that it can be killed at a chosen moment."""

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from threefold.train.callbacks.base import Callback, EvaluationRecord, RunContext, StepRecord


class Beacon(Callback):
    """Each rank writes its process id, then each moment of its run, into a file of `folder` that has its number.

    Lines are appended to `moments_RANK` as `PROCESS KIND STEP`. What begins is of the kinds start, step, evaluation and
    save, and what is over of made, evaluated, saved, and of staged, from where on a save goes on in the background.
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
