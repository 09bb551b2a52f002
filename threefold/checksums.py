"""Checksums of files and of bytes in memory, and JSON that carries its own.

An object is *sealed* by a last member with the checksum of all before it, so that a reader notices damage and changes.
"""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import xxhash

from threefold.files import STRICT, open_regular

ALGORITHM: Final = "xxh3_128"


def checksum(path: Path, advance: Callable[[int], None] = lambda size: None) -> str:
    """Return the checksum of a file's content as `xxh3_128:` and 32 hexadecimal digits.

    `advance` is called with the size of each block read.
    """
    with open_regular(path) as file:
        return checksum_of_file(file, advance)


def checksum_of_file(file: io.FileIO, advance: Callable[[int], None] = lambda size: None) -> str:
    """Return the checksum of what an open file holds, in the form of `checksum`."""
    digest, buffer = xxhash.xxh3_128(), bytearray(8 << 20)
    while size := file.readinto(buffer):
        digest.update(memoryview(buffer)[:size])
        advance(size)
    return f"{ALGORITHM}:{digest.hexdigest()}"


def checksum_of(content: bytes | memoryview) -> str:
    """Return the checksum of bytes in memory, in the form of `checksum`."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(content)}"


def checksum_of_blocks(blocks: Iterable[bytes | memoryview]) -> str:
    """Return the checksum of concatenated blocks, in the form of `checksum`."""
    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(block)
    return f"{ALGORITHM}:{digest.hexdigest()}"


def checksums(paths: Iterable[Path], advance: Callable[[int], None] = lambda size: None) -> list[str]:
    """Return the checksum of each file, in order, reading several files at a time."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and every command imports this module

    with ThreadPoolExecutor(4, thread_name_prefix="threefold-checksum") as pool:
        return list(pool.map(lambda path: checksum(path, advance), paths))


def short(checksum: str) -> str:
    """Return the first digits of a checksum, for messages."""
    return checksum.rpartition(":")[2][:12]


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    checksum: str
    __pydantic_config__: ClassVar[Any] = STRICT


_MARK: Final = '  "checksum": "'


def seal(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a JSON object with their checksum, which is independent of their order, appended."""
    return {**facts, "checksum": _checksum(facts)}


def unseal(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the members without their checksum, or None if it is missing or wrong."""
    members = {name: value for name, value in facts.items() if name != "checksum"}
    return members if facts.get("checksum") == _checksum(members) else None


def seal_text(document: str) -> str:
    """Append a checksum to the text of a JSON object, as its last member on a line of its own."""
    body = document.rstrip().removesuffix("}").rstrip() + ",\n"
    return f'{body}{_MARK}{checksum_of(body.encode())}"\n}}\n'


def is_intact(text: str) -> bool:
    """Return whether a text is exactly what `seal_text` returned."""
    body, mark, end = text.rpartition(_MARK)
    return bool(mark) and end == f'{checksum_of(body.encode())}"\n}}\n'


def _checksum(facts: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(facts, sort_keys=True).encode())
