"""Arrays of numbers in files, and the file names and dtypes of tokens in prepared folders and token caches."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final, Literal, Self, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from threefold.errors import UserError
from threefold.files import require_file, shown

META_FILE: Final = "meta.json"
TOKENS_FILE: Final = "tokens.bin"
DOCUMENTS_FILE: Final = "documents.bin"
LOSS_MASK_FILE: Final = "loss_mask.bin"
TOKENIZER_FILE: Final = "tokenizer.json"

DOCUMENT_DTYPE: Final = "<i8"
# Same bound as Fleet's token files, so that a vocabulary is stored in the same type by both.
_UINT16_VOCAB: Final = 65_500
TOKEN_DTYPES: Final = {"uint16": "<u2", "int32": "<i4"}


def dtype_for(vocab_size: int) -> Literal["uint16", "int32"]:
    """Return the name of the type that tokens of this vocabulary are stored in, a key of `TOKEN_DTYPES`."""
    return "uint16" if vocab_size < _UINT16_VOCAB else "int32"


class DocumentWriter:
    """Writer of the tokens of documents, of where each starts, and of their loss mask, into a folder.

    Args:
        starts: name of the file of starts.
        with_mask: whether there is a loss mask.

    Attributes:
        tokens, documents: numbers written so far.
    """

    def __init__(self, folder: Path, starts: str = DOCUMENTS_FILE, with_mask: bool = False) -> None:
        self.tokens = self.documents = 0
        names = [TOKENS_FILE, starts, *([LOSS_MASK_FILE] if with_mask else [])]
        with ExitStack() as files:
            self._files = [files.enter_context((folder / name).open("wb")) for name in names]
            self._open = files.pop_all()
        self._files[1].write(np.zeros(1, dtype=DOCUMENT_DTYPE).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def write(
        self, tokens: NDArray[np.integer], lengths: NDArray[np.integer], counted: NDArray[np.uint8] | None = None
    ) -> None:
        """Write documents, back to back in `tokens`; `counted` is 1 where a token counts for the loss."""
        ends = self.tokens + np.cumsum(lengths)
        for file, values in zip(self._files, (tokens, ends.astype(DOCUMENT_DTYPE), counted), strict=False):
            file.write(np.ascontiguousarray(values).data)
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + len(lengths)


_AT_ONCE: Final = 1 << 30
"""Maximum bytes per read; Linux returns less than 2 GiB."""
_GAP: Final = 1 << 12
"""Distance up to which reading the numbers between two wanted ones is faster than another call."""
_SPAN: Final = 1 << 20
"""Maximum count of numbers read together across such gaps."""

LARGEST_IN_MEMORY: Final = 1 << 28
"""Bytes of the largest column that `load_column` keeps in memory, once per rank."""


class StoredArray:
    """One-dimensional array of numbers in a file that is opened once and read on indexing.

    Indexing returns read-only data in memory: an integer gives a number; a slice of step 1 or an integer array (of any
    shape) gives an array. Safe to use from several threads and after a fork.

    Args:
        path: a regular file.
        dtype: type of the numbers, including their byte order.
        count: number of elements.
        offset: byte at which the first number begins.

    Raises:
        UserError: the file cannot be read, or is too short.
    """

    def __init__(self, path: Path, dtype: DTypeLike, count: int, offset: int = 0) -> None:
        self.path, self.dtype, self.count, self.offset = path, np.dtype(dtype), count, offset
        require_file(path)
        try:
            self._file: IO[bytes] = path.open("rb", buffering=0)
        except OSError as error:
            raise UserError(f"Cannot read {shown(path)}: {error.strerror}.") from None
        self._handle = self._file.fileno()
        if os.fstat(self._handle).st_size < self._end:
            raise self._truncated()

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int]:
        return (self.count,)

    @property
    def size(self) -> int:
        return self.count

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, index: int | np.integer) -> np.integer: ...
    @overload
    def __getitem__(self, index: slice | NDArray[np.integer]) -> NDArray[np.integer]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self.count)
            if step != 1:
                raise IndexError("a stored array is read in steps of 1")
            values = np.empty(max(0, stop - start), dtype=self.dtype)
            self._read(start, values)
        elif isinstance(index, np.ndarray) and index.ndim:
            values = self._gather(index)
        else:
            place = range(self.count)[index]
            values = np.empty(1, dtype=self.dtype)
            self._read(place, values)
            return values[0]
        values.flags.writeable = False
        return values

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        values = self[:]
        return values if dtype is None else values.astype(dtype)

    def tolist(self) -> list[int]:
        return self[:].tolist()

    def _gather(self, places: NDArray[np.integer]) -> NDArray[np.integer]:
        """Read the numbers at `places`, with one read for each group that is close together."""
        flat = np.ascontiguousarray(places).ravel()
        values = np.empty(flat.size, dtype=self.dtype)
        if flat.size:
            if flat.min() < 0 or flat.max() >= self.count:
                raise IndexError(f"an index is outside the {self.count} numbers of {self.path}")
            cuts = np.flatnonzero(np.diff(flat) != 1)
            before, after = flat[cuts], flat[cuts + 1]
            apart = (after <= before) | (after - before > _GAP) | (before // _SPAN != after // _SPAN)
            firsts = np.append(0, cuts[apart] + 1)
            ends = np.append(firsts[1:], flat.size)
            starts, spans = flat[firsts], flat[ends - 1] - flat[firsts] + 1
            for first, end, start, span in zip(*map(np.ndarray.tolist, (firsts, ends, starts, spans)), strict=True):
                if span == end - first:
                    self._read(start, values[first:end])
                else:
                    between = np.empty(span, dtype=self.dtype)
                    self._read(start, between)
                    np.take(between, flat[first:end] - start, out=values[first:end])
        return values.reshape(places.shape)

    def _read(self, start: int, values: NDArray[Any]) -> None:
        if not values.size:
            return
        place = self.offset + start * self.dtype.itemsize
        view = memoryview(values.view(np.uint8).data)
        while view:
            try:
                got = os.preadv(self._handle, [view[:_AT_ONCE]], place)
            except OSError as error:
                raise UserError(f"Cannot read {shown(self.path)}: {error.strerror}.") from None
            if not got:
                raise self._truncated()
            view, place = view[got:], place + got

    @property
    def _end(self) -> int:
        return self.offset + self.nbytes

    def _truncated(self) -> UserError:
        size = os.fstat(self._handle).st_size
        return UserError(
            f"{shown(self.path)} holds {size:,} bytes and must hold {self._end:,}, so it was truncated; copy it "
            "again, or make it again."
        )


def load_column(path: Path, dtype: DTypeLike, count: int, offset: int = 0) -> NDArray[Any]:
    """Load numbers that are accessed throughout: into memory, or memory-mapped above `LARGEST_IN_MEMORY` bytes.

    Raises:
        UserError: the file cannot be read, or is too short.
    """
    stored = StoredArray(path, dtype, count, offset)
    if stored.nbytes <= LARGEST_IN_MEMORY:
        return stored[:]
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))
