"""TensorBoard's event files, and the base of callbacks that send the values of each step to another service."""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Final

from threefold.foreign import own_folder
from threefold.train.callbacks.base import Callback, RunContext, reason_of, say
from threefold.train.callbacks.records import EvaluationRecord, StepRecord, evaluation_values, step_values

TENSORBOARD_FOLDER = "tensorboard"
SECONDS_BETWEEN_FLUSHES = 10


def import_writer() -> None:
    """Import the event-file writer, if it is installed, once in a launcher that may restart its ranks."""
    if find_spec("tensorboard") is not None:
        import tensorboard.compat.proto.event_pb2  # noqa: F401


_TAGS: Final = {  # tag in TensorBoard of a value, or of all values whose names begin so
    "loss": "loss/train",
    "grad_norm": "gradient_norm",
    "lr": "learning_rate",
    "valid_loss": "loss/validation",
    "term/": "terms/",
    "valid_loss/": "loss/validation of ",
    "valid_term/": "terms/validation of ",
}


class Tracker(Callback):
    """Base class of callbacks that send the values of each step and evaluation somewhere.

    A failure is reported once, with `service` (such as `MLflow cannot log`) at its beginning, and the training
    continues without. The `connection` is None before it is made, and when it is closed or has failed.
    """

    service: str
    connection: Any = None

    def try_out(self) -> None:
        """Raise a `UserError` before any rank starts if the arguments can reach nothing, without sending anything."""

    def send(self, step: int, values: dict[str, float]) -> None:
        """Send the values after `step`."""
        raise NotImplementedError

    def after_step(self, record: StepRecord) -> None:
        self.log(record.step, step_values(record))

    def after_evaluation(self, record: EvaluationRecord) -> None:
        self.log(record.step, evaluation_values(record))

    def log(self, step: int, values: dict[str, float]) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self.send(step, values)

    @contextmanager
    def failures_reported(self) -> Iterator[None]:
        """Report a failure inside the block, and drop the connection."""
        try:
            yield
        except Exception as error:  # a network or disk failure is no reason to end a training
            lost, self.connection = self.connection, None
            with suppress(Exception):
                lost.close()
            say(f"Warning: {self.service} ({reason_of(error)}); training continues without it.")


class TensorBoard(Tracker):
    """Write event files if TensorBoard is installed; in it, repeated steps of a resumed run replace the earlier ones.

    This uses TensorBoard's messages, but neither its `SummaryWriter`, whose thread would print a traceback on a full
    disk, nor its record writer, whose import takes a tenth of a second before the first step. The first failure is
    reported once, and the run continues without these files.
    """

    packages = ("tensorboard",)

    @classmethod
    def for_run(cls, run: RunContext) -> Callback | None:
        if find_spec("tensorboard") is None:
            say("No files for TensorBoard, which is not installed: pip install 'threefold[tensorboard]'.")
            return None
        return cls(run.run_dir / TENSORBOARD_FOLDER)

    def __init__(self, folder: Path) -> None:
        self.folder, self.service = folder, f"{folder} cannot be written"
        self._flushed = 0.0

    def before_fit(self, start: int) -> None:
        with self.failures_reported():
            from tensorboard.compat.proto import event_pb2  # noqa: F401  # where it fails, no empty file is left

            own_folder(self.folder)
            begins = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            names = (self.folder / f"{begins}.{number}" for number in count())  # TensorBoard sorts the newest last
            self.connection = next(name for name in names if not os.path.lexists(name)).open("xb")
            self._add(file_version="brain.Event:2")
            self._begin_after(start)

    def after_rollback(self, step: int, start: int, reason: str) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self._begin_after(start)

    def _begin_after(self, start: int) -> None:
        """Make TensorBoard drop the values of the steps after `start`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step=start + 1, session_log=SessionLog(status=SessionLog.START))

    def after_step(self, record: StepRecord) -> None:
        if not record.is_read:
            return
        values = {name: value for name, value in step_values(record).items() if name != "epoch"}
        values["seconds/step"] = record.seconds
        if record.performance is not None:
            values["seconds/wall_clock"] = record.performance.wall_clock
            values["seconds/waited"] = record.performance.waited
        self.log(record.step, values)

    def close(self) -> None:
        if self.connection is not None:
            with self.failures_reported():
                self.connection.close()
            self.connection = None

    def send(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary()
        for name, value in values.items():
            begins = name[: name.find("/") + 1]
            tag = _TAGS.get(name) or _TAGS.get(begins, begins) + name[len(begins) :]
            summary.value.append(Summary.Value(tag=tag, simple_value=value))
        self._add(step=step, summary=summary)

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # only on the rank that writes

        self.connection.write(framed(Event(wall_time=time.time(), **fields).SerializeToString()))
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self.connection.flush()
            self._flushed = time.monotonic()


def framed(record: bytes) -> bytes:
    """Frame a record for TensorFlow's TFRecord format: its length, the record, and a checksum of each."""
    length = struct.pack("<Q", len(record))
    return length + _masked_checksum(length) + record + _masked_checksum(record)


def _masked_checksum(data: bytes) -> bytes:
    """Return the CRC-32C (Castagnoli), rotated and shifted as TFRecord defines it."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _CRC_TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    checksum ^= 0xFFFFFFFF
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE: Final = tuple(map(_crc_entry, range(256)))
