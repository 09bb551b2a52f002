"""The token files of PaddleFleetX (PaddlePaddle Fleet): PREFIX_ids.npy with PREFIX_idx.npz, or PREFIX_ids.npz.

PREFIX_ids.npy  the tokens back to back, uint16 or int32
PREFIX_idx.npz  lens int32 [S], tokens of each sequence; docs int64 [D + 1], the first sequence of each document
PREFIX_ids.npz  ids, the tokens, and lens, those of each document
"""

from pathlib import Path
from typing import Final

import numpy as np

from threefold.data.corpus import StoredTokens
from threefold.data.formats.numpy_files import StoredColumn, read_npy, read_npz
from threefold.data.formats.registry import TokenFormat, with_ending
from threefold.errors import UserError
from threefold.random.permutation import Int64Array

FORMAT: Final = "Fleet"
IDS_NPY: Final = "_ids.npy"
IDX_NPZ: Final = "_idx.npz"
IDS_NPZ: Final = "_ids.npz"

_AGAIN: Final = "copy the files again, or make them again"


def read_paddlefleetx(prefix: Path) -> StoredTokens:
    """The tokens of PREFIX_ids.npy and PREFIX_idx.npz.

    Raises:
        UserError: a file is missing, truncated, not of this format, or the two contradict one another.
    """
    ids_file, idx_file = (with_ending(prefix, ending) for ending in (IDS_NPY, IDX_NPZ))
    ids, index = read_npy(ids_file), read_npz(idx_file, ("lens", "docs"))
    sequences = _sequence_starts(idx_file, ids_file, _named(index, "lens", idx_file), ids)
    documents = None
    if "docs" in index:
        documents = index["docs"].loaded().astype(np.int64)
        last = len(sequences) - 1
        if not len(documents) or documents[0] != 0 or documents[-1] != last or np.any(np.diff(documents) < 0):
            raise UserError(
                f'{idx_file} has "docs" that do not rise from 0 to the {last:,} sequences of its "lens"; {_AGAIN}.'
            )
        if len(documents) == len(sequences) and np.all(np.diff(documents) == 1):
            documents = None
    return StoredTokens(prefix, FORMAT, (ids_file, idx_file), ids.values, sequences, documents)


def read_paddlefleetx_npz(prefix: Path) -> StoredTokens:
    """The tokens of PREFIX_ids.npz.

    Raises:
        UserError: the file is truncated, not of this format, or contradicts itself.
    """
    path = with_ending(prefix, IDS_NPZ)
    columns = read_npz(path, ("ids", "lens"))
    ids = _named(columns, "ids", path)
    sequences = _sequence_starts(path, path, _named(columns, "lens", path), ids)
    cost = (
        f"{path.name} is compressed, so every process unpacks its tokens, {ids.unpacked / 1e6:,.1f} MB, into memory of "
        "its own; `threefold data convert` makes files that are read in place."
    )
    notes = (cost,) if ids.unpacked else ()
    return StoredTokens(prefix, f"{FORMAT}, legacy", (path,), ids.values, sequences, notes=notes)


def _named(columns: dict[str, StoredColumn], name: str, path: Path) -> StoredColumn:
    if name not in columns:
        raise UserError(f'{path} has no array "{name}", so it is no token file of {FORMAT}.')
    return columns[name]


def _sequence_starts(index: Path, tokens: Path, lens: StoredColumn, ids: StoredColumn) -> Int64Array:
    lengths = lens.loaded()
    if not len(ids.values):
        raise UserError(f"{tokens} holds no tokens, so there is nothing to read.")
    if lengths.min(initial=0) < 0:
        sequence = int(np.argmax(lengths < 0))
        raise UserError(f'{index} has "lens" {lengths[sequence]} for sequence {sequence:,}; {_AGAIN}.')
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    if starts[-1] != len(ids.values):
        raise UserError(
            f'{index} has "lens" that add up to {starts[-1]:,} but {tokens.name} holds {len(ids.values):,} tokens; '
            f"{_AGAIN}."
        )
    return starts


PADDLEFLEETX: Final = TokenFormat((IDS_NPY, IDX_NPZ), read_paddlefleetx)
PADDLEFLEETX_NPZ: Final = TokenFormat((IDS_NPZ,), read_paddlefleetx_npz)
