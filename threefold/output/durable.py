"""Writing that survives a crash of the machine: what has returned is on the disk (fsync)."""

import os
from pathlib import Path

from threefold.output.links import replace_link


def sync(path: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Write a file that is on the disk afterwards."""
    with replace_link(path).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
