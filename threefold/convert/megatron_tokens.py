"""Token files of Megatron-LM: PREFIX.bin and PREFIX.idx, read and written.

PREFIX.idx, little endian: 9 bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of the tokens' type, uint64 S =
sequences, uint64 D = documents + 1, int32 [S] lengths in tokens, int64 [S] byte offsets into PREFIX.bin, int64 [D]
first sequence of each document (the last is S), and in files of several kinds of data int8 [S] modes. PREFIX.bin holds
the tokens back to back.
"""

import os
import struct
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from threefold.data.corpus import StoredArray, StoredTokens, load_column
from threefold.data.formats.registry import TokenFormat, with_ending
from threefold.errors import UserError
from threefold.files import require_file, shown
from threefold.output import Progress
from threefold.random import Int64Array

FORMAT: Final = "Megatron-LM"
BIN: Final = ".bin"
IDX: Final = ".idx"

_MAGIC: Final = b"MMIDIDX\x00\x00"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<9sQBQQ")
_CODES: Final = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS: Final = {6: "float64", 7: "float32"}
_MAKE_AGAIN: Final = "copy it again, or make it again with Megatron-LM's tools/preprocess_data.py"


def read_megatron(prefix: Path) -> StoredTokens:
    """Read the tokens of PREFIX.bin and PREFIX.idx. Raises UserError if they are damaged or of another format."""
    idx, tokens_file = with_ending(prefix, IDX), with_ending(prefix, BIN)
    for path in (idx, tokens_file):
        if not os.path.lexists(path):
            raise UserError(
                f"{shown(path)} is missing, and the other file of the pair is useless without it; {_MAKE_AGAIN}."
            )
        require_file(path)
    dtype, count, bound_count = _read_header(idx)
    fixed = _HEADER.size + 12 * count + 8 * bound_count
    lengths = load_column(idx, "<i4", count, _HEADER.size)
    offsets = load_column(idx, "<i8", count, _HEADER.size + 4 * count)
    bounds = load_column(idx, "<i8", bound_count, _HEADER.size + 12 * count)
    modes = load_column(idx, "<i1", count, fixed) if idx.stat().st_size > fixed else None
    sequences = _sequence_starts(idx, lengths, offsets, dtype.itemsize)
    if bounds[0] != 0 or bounds[-1] != count or np.any(np.diff(bounds) < 0):
        raise UserError(
            f"{idx} has document bounds from {bounds[0]:,} to {bounds[-1]:,}, but they must rise from 0 to its "
            f"{count:,} sequences; {_MAKE_AGAIN}."
        )
    tokens, size = int(sequences[-1]), tokens_file.stat().st_size
    if size != tokens * dtype.itemsize:
        raise UserError(
            f"{tokens_file} has {size:,} bytes but the lengths in {idx.name} add up to {tokens:,} tokens of "
            f"{dtype.name}, {tokens * dtype.itemsize:,} bytes; {_MAKE_AGAIN}."
        )
    if not tokens:
        raise UserError(f"{tokens_file} holds no tokens, so there is nothing to read.")
    alone = len(bounds) == len(sequences) and bool(np.all(np.diff(bounds) == 1))
    return StoredTokens(
        path=prefix,
        format=FORMAT,
        files=(tokens_file, idx),
        tokens=StoredArray(tokens_file, dtype, tokens),
        sequences=sequences,
        document_sequences=None if alone else np.array(bounds, dtype=np.int64),
        modes=modes,
    )


def _read_header(idx: Path) -> tuple[np.dtype, int, int]:
    """Return the tokens' type, and the numbers of sequences and of document bounds."""
    size = idx.stat().st_size
    with idx.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head.startswith(_MAGIC[: len(head)]) or not head:
        raise UserError(f"{idx} is not an index of {FORMAT}: it begins with {head[:9]!r} and not with {_MAGIC!r}.")
    if len(head) < _HEADER.size:
        raise UserError(f"{idx} is truncated: it has {size} bytes and the header alone {_HEADER.size}; {_MAKE_AGAIN}.")
    _, version, code, sequences, bounds = _HEADER.unpack(head)
    if version != _VERSION:
        raise UserError(f"{idx} has version {version} of the format and this Threefold reads version {_VERSION}.")
    if code in _FLOATS:
        raise UserError(f"{idx} says that its .bin holds {_FLOATS[code]} numbers, which are not tokens.")
    if code not in _CODES:
        known = ", ".join(f"{known} {np.dtype(name).name}" for known, name in _CODES.items())
        raise UserError(f"{idx} has the unknown type code {code}; those of tokens are {known}.")
    fixed = _HEADER.size + 12 * sequences + 8 * bounds
    if size not in (fixed, fixed + sequences):
        raise UserError(
            f"{idx} has {size:,} bytes but with the {sequences:,} sequences and {bounds:,} document bounds of its "
            f"header it must have {fixed:,} ({fixed + sequences:,} with modes); {_MAKE_AGAIN}."
        )
    if not sequences or not bounds:
        raise UserError(
            f"{idx} has {sequences:,} sequences and {bounds:,} document bounds, so there is nothing to read."
        )
    return np.dtype(_CODES[code]), sequences, bounds


def _sequence_starts(idx: Path, lengths: NDArray, offsets: NDArray, itemsize: int) -> Int64Array:
    if lengths.min() < 0:
        sequence = int(np.argmax(lengths < 0))
        raise UserError(f"{idx} gives sequence {sequence:,} the length {lengths[sequence]}; {_MAKE_AGAIN}.")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    wrong = offsets != starts[:-1] * itemsize
    if wrong.any():
        sequence = int(np.argmax(wrong))
        raise UserError(
            f"{idx} says that sequence {sequence:,} starts at byte {offsets[sequence]:,} of the .bin, but the lengths "
            f"before it end at byte {starts[sequence] * itemsize:,}; {_MAKE_AGAIN}."
        )
    return starts


def write_idx(file: BinaryIO, stored: StoredTokens) -> None:
    """Write the index of the tokens of `stored`. Raises UserError if the format cannot hold their type or lengths."""
    codes = {np.dtype(name): code for code, name in _CODES.items()}
    dtype = stored.tokens.dtype.newbyteorder("<")
    if dtype not in codes:
        raise UserError(f"{stored.path} holds {dtype.name} tokens, for which {FORMAT} has no type code.")
    sequences = stored.sequences
    lengths = np.diff(sequences)
    if lengths.max(initial=0) > np.iinfo(np.int32).max:
        raise UserError(
            f"{stored.path} has a document of {lengths.max():,} tokens and {FORMAT} counts to 2,147,483,647."
        )
    bounds = stored.document_sequences
    bounds = np.arange(len(sequences), dtype=np.int64) if bounds is None else bounds
    file.write(_HEADER.pack(_MAGIC, _VERSION, codes[dtype], len(lengths), len(bounds)))
    for column, kind in ((lengths, "<i4"), (sequences[:-1] * dtype.itemsize, "<i8"), (bounds, "<i8")):
        file.write(np.ascontiguousarray(column, dtype=kind).data)
    if stored.modes is not None:
        file.write(np.ascontiguousarray(stored.modes, dtype="<i1").data)


def write_megatron(stored: StoredTokens, prefix: Path, progress: Progress) -> None:
    """Write PREFIX.idx and PREFIX.bin: equal tokens, dtype, sequences, documents and modes. Raises like `write_idx`."""
    with with_ending(prefix, IDX).open("wb") as index:  # first, as it fails early if the format cannot hold the tokens
        write_idx(index, stored)
    little = stored.tokens.dtype.newbyteorder("<")
    progress.phase("Copying tokens", stored.tokens.nbytes)
    with with_ending(prefix, BIN).open("wb") as file:
        for start in range(0, len(stored.tokens), 1 << 22):
            chunk = np.ascontiguousarray(stored.tokens[start : start + (1 << 22)], dtype=little)
            file.write(chunk.data)
            progress.advance(chunk.nbytes)


MEGATRON: Final = TokenFormat((BIN, IDX), read_megatron, write_megatron)
