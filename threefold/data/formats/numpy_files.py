"""Arrays out of .npy and .npz files, left in the file where they are stored as they are."""

import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from threefold.data.stored_array import StoredArray
from threefold.errors import UserError
from threefold.files import require_file, shown

_MOST_PACKED: Final = 1100
"""More times than deflate makes anything smaller, so that a larger claim is damage."""
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
# What the libraries raise over a damaged file: RuntimeError where the damage looks like encryption.
_DAMAGE: Final = (OSError, EOFError, ValueError, KeyError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class StoredColumn:
    """A one-dimensional array of whole numbers.

    Attributes:
        values: [N], read only.
        unpacked: bytes of memory that it takes because it was stored compressed; 0 if it is left in the file.
    """

    values: NDArray[np.integer] | StoredArray
    unpacked: int = 0

    def loaded(self) -> NDArray[np.integer]:
        """The numbers in memory."""
        return self.values[:]


def read_npy(path: Path) -> StoredColumn:
    """The array of a .npy file.

    Raises:
        UserError: the file cannot be read, is truncated, or holds anything but one row of whole numbers.
    """
    _require(path)
    try:
        with path.open("rb") as file:
            return StoredColumn(_stored(file, path, 0, path.stat().st_size))
    except _DAMAGE as error:
        raise _damaged(path, error) from None


def read_npz(path: Path, names: tuple[str, ...]) -> dict[str, StoredColumn]:
    """The arrays of a .npz file that have one of `names`; those that it does not hold are left out.

    A member that is stored uncompressed, as `np.savez` does, is left in the file; a compressed one is unpacked into
    memory.

    Raises:
        UserError: the file cannot be read, is truncated, or holds anything but rows of whole numbers under these names.
    """
    _require(path)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = {member.filename: member for member in archive.infolist()}
            found = {name: members[f"{name}.npy"] for name in names if f"{name}.npy" in members}
            return {name: _member(archive, file, path, member) for name, member in found.items()}
    except _DAMAGE as error:
        raise _damaged(path, error) from None


def _member(archive: zipfile.ZipFile, file: IO[bytes], path: Path, member: zipfile.ZipInfo) -> StoredColumn:
    if member.compress_type == zipfile.ZIP_STORED:
        # The directory at the end of a zip file does not have the length of the header before the data.
        file.seek(member.header_offset)
        magic, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        if magic != b"PK\x03\x04" or file.read(name) != member.orig_filename.encode():
            raise ValueError(f"{member.filename} is not where the directory says")
        start = member.header_offset + _LOCAL_HEADER.size + name + extra
        return StoredColumn(_stored(file, path, start, start + member.file_size))
    with archive.open(member) as stream:
        (count,), dtype = _read_header(stream)
        header, size = stream.tell(), count * dtype.itemsize
        if header + size != member.file_size or member.file_size > _MOST_PACKED * (member.compress_size + 1):
            held = (member.file_size - header) // dtype.itemsize
            raise ValueError(f"{member.filename} holds {max(0, held):,} numbers and its header says {count:,}")
        if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2:
            raise ValueError(
                f"{member.filename} is compressed and takes {size:,} bytes of memory in every process, of which this "
                f"machine has {memory:,}; store it with np.savez instead of np.savez_compressed"
            )
        values = np.frombuffer(stream.read(size), dtype=dtype)
        if stream.read(1) or len(values) != count:
            raise ValueError(f"{member.filename} does not hold the {count:,} numbers that its header says")
    return StoredColumn(values, values.nbytes)


def _require(path: Path) -> None:
    if not os.path.lexists(path):
        raise UserError(f"{shown(path)} is missing.")
    require_file(path)


def _stored(file: IO[bytes], path: Path, start: int, end: int) -> StoredArray:
    """The array whose header begins at byte `start` of a file and whose numbers end at byte `end`."""
    file.seek(start)
    (count,), dtype = _read_header(file)
    offset, size = file.tell(), path.stat().st_size
    if count < 0 or offset + count * dtype.itemsize != end or end > size:
        held = (min(end, size) - offset) // dtype.itemsize
        raise ValueError(f"its header says {count:,} numbers of {dtype.name} and it holds {max(0, held):,}")
    return StoredArray(path, dtype, count, offset)


def _read_header(stream: IO[bytes]) -> tuple[tuple[int], np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it is of version {version} of the .npy format")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = read(stream)
    except Exception:  # it is read as Python, so damage raises what Python's own parser does
        raise ValueError("the header before its numbers is damaged") from None
    if dtype.kind not in "iu":
        raise ValueError(f"it holds {dtype.name} and not whole numbers")
    if len(shape) != 1 or type(shape[0]) is not int:
        raise ValueError(f"it has the shape {shape} and not one dimension")
    return shape, dtype


def _damaged(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(f"{path} cannot be read: {reason}.")
