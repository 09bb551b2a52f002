"""RUN/tensorboard: the curves for TensorBoard."""

import time
from pathlib import Path
from typing import Any

from threefold.train.hooks import EvaluationRecord, Hook, StepRecord

FOLDER = "tensorboard"
SECONDS_BETWEEN_FLUSHES = 10


class TensorBoard(Hook):
    """Writes event files; what a resumed run makes anew takes the place of what it was before.

    Through TensorBoard's own writer: `torch.utils.tensorboard` would import several times as much.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def before_fit(self, start: int) -> None:
        # Imported by the one rank that writes, not by all.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self.folder), flush_secs=SECONDS_BETWEEN_FLUSHES)
        # TensorBoard drops what older files have from this step on.
        session = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=start + 1, session_log=session))

    def after_step(self, record: StepRecord) -> None:
        values = {
            "loss/train": record.loss,
            "gradient_norm": record.grad_norm,
            "learning_rate": record.lr,
            "tokens_per_second": record.tokens_per_second,
        }
        if record.loss_scale is not None:
            values["loss_scale"] = record.loss_scale
        self._write(record.step, values)

    def after_evaluation(self, record: EvaluationRecord) -> None:
        by_corpus = {f"loss/validation of {name}": loss for name, loss in record.corpus_losses.items()}
        self._write(record.step, {"loss/validation": record.loss, **by_corpus})

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is not None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
