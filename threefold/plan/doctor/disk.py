"""How fast a folder takes what is written to it, as checkpoints are."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from threefold.errors import UserError
from threefold.files import shown

_BLOCK = 4 << 20


@dataclass(frozen=True)
class DiskSpeed:
    """The disk of a folder.

    Attributes:
        folder: where a file was written, and deleted again.
        bandwidth: bytes per second, until they were on the disk.
        free: bytes.
    """

    folder: str
    bandwidth: float
    free: int


def measure_disk(folder: Path, nbytes: int) -> DiskSpeed:
    """Write so many bytes into a new file of `folder`, and wait until they are on the disk.

    Raises:
        UserError: the folder cannot be written.
    """
    block = os.urandom(_BLOCK)  # which no disk compresses
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".threefold-doctor-") as file:
            started = time.perf_counter()
            for _ in range(max(1, nbytes // _BLOCK)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
        space = os.statvfs(folder)
    except OSError as error:
        raise UserError(f"The folder {shown(str(folder))} cannot be written: {error.strerror}.") from None
    return DiskSpeed(str(folder.resolve()), max(_BLOCK, nbytes) / seconds, space.f_bavail * space.f_frsize)
