"""Checksums that find a damaged file: XXH3 of 128 bits, which is faster than a disk.

They protect against what disks, memory and copying do to files, not against an attacker.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

ALGORITHM: Final = "xxh3_128"
_BLOCK: Final = 8 << 20
_THREADS: Final = 4


def checksum(path: Path, advance: Callable[[int], None] = lambda size: None) -> str:
    """The checksum of a file's content, as `xxh3_128:` and 32 hexadecimal digits.

    Args:
        path: a regular file.
        advance: called with the bytes of each block that was read.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
            advance(size)
    return f"{ALGORITHM}:{digest.hexdigest()}"


def checksum_of(content: bytes | memoryview) -> str:
    """The checksum of bytes in memory, in the form of `checksum`."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(content)}"


def checksum_of_blocks(blocks: Iterable[bytes | memoryview]) -> str:
    """The checksum of blocks one after the other, in the form of `checksum`."""
    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(block)
    return f"{ALGORITHM}:{digest.hexdigest()}"


def checksums(paths: Iterable[Path], advance: Callable[[int], None] = lambda size: None) -> list[str]:
    """The checksum of each file, in order; several are read at a time.

    Raises:
        OSError: one cannot be read.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="threefold-checksum") as pool:
        return list(pool.map(lambda path: checksum(path, advance), paths))
