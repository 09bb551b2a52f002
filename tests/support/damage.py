"""Damage that a disk does."""

from pathlib import Path


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file, counted from its beginning."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
