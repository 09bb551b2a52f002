"""Event files, read back by TensorBoard's own reader, and the checksums by which it finds damaged ones."""

import random
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from threefold.train.callbacks.tensorboard import framed


def test_records_are_framed_as_tensorboard_reads_them(tmp_path: Path) -> None:
    records = [random.Random(size).randbytes(size) for size in (1, 8, 9, 255, 4096)]
    file = tmp_path / "events"
    file.write_bytes(b"".join(map(framed, records)))
    assert list(RawEventFileLoader(str(file)).Load()) == records
    for record in records:
        assert framed(record)[-4:] == masked_crc32c(record).to_bytes(4, "little")
