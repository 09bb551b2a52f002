"""Token files of PaddleFleetX (Fleet): PREFIX_ids.npy with PREFIX_idx.npz, or the legacy PREFIX_ids.npz.

Arrays of .npy and .npz files stay in the file if they are stored uncompressed.
"""

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from threefold.data.corpus import StoredArray, StoredTokens
from threefold.data.formats.registry import TokenFormat, with_ending
from threefold.errors import UserError
from threefold.files import require_file, shown
from threefold.random import Int64Array

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
# Errors that the libraries raise for a damaged file; RuntimeError if the damage looks like encryption.
_DAMAGE: Final = (OSError, EOFError, ValueError, KeyError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error)


Column = NDArray[np.integer] | StoredArray
"""One-dimensional array of integers, read only: in its file, or in memory if it was stored compressed."""


def read_npy(path: Path) -> Column:
    """Read the one-dimensional array of integers in a .npy file. Raises UserError if it is anything else or damaged."""
    with _explained(path), path.open("rb") as file:
        return _stored(file, path, 0, path.stat().st_size)


def read_npz(path: Path, names: tuple[str, ...]) -> dict[str, Column]:
    """Read the integer arrays called `names` in a .npz file, if it has them; compressed ones into memory."""
    with _explained(path), zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {member.filename: member for member in archive.infolist()}
        # Of all members: a damaged name would make an array that is optional seem absent.
        starts = {member.filename: _data_start(file, member) for member in archive.infolist()}
        found = {name: members[f"{name}.npy"] for name in names if f"{name}.npy" in members}
        return {name: _member(archive, file, path, member, starts) for name, member in found.items()}


def _data_start(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Return where a member's data start: the directory at the end of a zip file lacks the length of their header."""
    file.seek(member.header_offset)
    magic, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if magic != b"PK\x03\x04" or file.read(name) != member.orig_filename.encode():
        raise ValueError(f"{member.filename} is not where the directory says")
    return int(member.header_offset + _LOCAL_HEADER.size + name + extra)


def _member(
    archive: zipfile.ZipFile, file: IO[bytes], path: Path, member: zipfile.ZipInfo, starts: Mapping[str, int]
) -> Column:
    if member.compress_type == zipfile.ZIP_STORED:
        if member.filename != _TOKENS:
            with archive.open(member) as stream:
                while stream.read(1 << 20):  # up to its end, where its checksum is compared
                    pass
        start = starts[member.filename]
        return _stored(file, path, start, start + member.file_size)
    with archive.open(member) as stream:
        (count,), dtype = _read_header(stream)
        header, size = stream.tell(), count * dtype.itemsize
        # Deflate packs numbers a thousandfold at most; a larger claim means damage.
        if header + size != member.file_size or member.file_size > 1100 * (member.compress_size + 1):
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
    return values


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn any sign of a damaged file into a UserError; raise one if there is no file."""
    if not os.path.lexists(path):
        raise UserError(f"{shown(path)} is missing.")
    require_file(path)
    try:
        yield
    except _DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} cannot be read: {reason}.") from None


def _stored(file: IO[bytes], path: Path, start: int, end: int) -> StoredArray:
    """Return the array whose header begins at byte `start` of a file and whose numbers end at byte `end`."""
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
    except Exception:  # numpy parses the header as Python, so damage raises any error of Python's parser
        raise ValueError("the header before its numbers is damaged") from None
    if dtype.kind not in "iu":
        raise ValueError(f"it holds {dtype.name} and not whole numbers")
    if len(shape) != 1 or type(shape[0]) is not int:
        raise ValueError(f"it has the shape {shape} and not one dimension")
    return shape, dtype


FORMAT: Final = "Fleet"
_TOKENS: Final = "ids.npy"  # too large to be read whole at each start
IDS_NPY: Final = "_ids.npy"
IDX_NPZ: Final = "_idx.npz"
IDS_NPZ: Final = "_ids.npz"

_AGAIN: Final = "copy the files again, or make them again"


def read_paddlefleetx(prefix: Path) -> StoredTokens:
    """Read the tokens of PREFIX_ids.npy and PREFIX_idx.npz. Raises UserError if they are damaged."""
    ids_file, idx_file = (with_ending(prefix, ending) for ending in (IDS_NPY, IDX_NPZ))
    ids, index = read_npy(ids_file), read_npz(idx_file, ("lens", "docs"))
    sequences = _sequence_starts(idx_file, ids_file, _named(index, "lens", idx_file), ids)
    documents = None
    if "docs" in index:
        documents = index["docs"][:].astype(np.int64)
        last = len(sequences) - 1
        if not len(documents) or documents[0] != 0 or documents[-1] != last or np.any(np.diff(documents) < 0):
            raise UserError(
                f'{idx_file} has "docs" that do not rise from 0 to the {last:,} sequences of its "lens"; {_AGAIN}.'
            )
        if len(documents) == len(sequences) and np.all(np.diff(documents) == 1):
            documents = None
    return StoredTokens(prefix, FORMAT, (ids_file, idx_file), ids, sequences, documents)


def read_paddlefleetx_npz(prefix: Path) -> StoredTokens:
    """Read the tokens of PREFIX_ids.npz. Raises UserError if it is damaged."""
    path = with_ending(prefix, IDS_NPZ)
    columns = read_npz(path, ("ids", "lens"))
    ids = _named(columns, "ids", path)
    sequences = _sequence_starts(path, path, _named(columns, "lens", path), ids)
    notes: tuple[str, ...] = ()
    if isinstance(ids, np.ndarray):
        notes = (
            f"{path.name} is compressed, so every process unpacks its tokens, {ids.nbytes / 1e6:,.1f} MB, into memory "
            "of its own; `threefold data convert` makes files that are read in place.",
        )
    return StoredTokens(prefix, f"{FORMAT}, legacy", (path,), ids, sequences, notes=notes)


def _named(columns: dict[str, Column], name: str, path: Path) -> Column:
    if name not in columns:
        raise UserError(f'{path} has no array "{name}", so it is not a token file of {FORMAT}.')
    return columns[name]


def _sequence_starts(index: Path, tokens: Path, lens: Column, ids: Column) -> Int64Array:
    lengths = lens[:]
    if not len(ids):
        raise UserError(f"{tokens} holds no tokens, so there is nothing to read.")
    if lengths.min(initial=0) < 0:
        sequence = int(np.argmax(lengths < 0))
        raise UserError(f'{index} has "lens" {lengths[sequence]} for sequence {sequence:,}; {_AGAIN}.')
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if starts[-1] != len(ids):
        raise UserError(
            f'{index} has "lens" that add up to {starts[-1]:,} but {tokens.name} holds {len(ids):,} tokens; {_AGAIN}.'
        )
    return starts


PADDLEFLEETX: Final = TokenFormat((IDS_NPY, IDX_NPZ), read_paddlefleetx)
PADDLEFLEETX_NPZ: Final = TokenFormat((IDS_NPZ,), read_paddlefleetx_npz)
