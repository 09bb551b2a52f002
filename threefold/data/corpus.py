"""Tokens in files: arrays that are read on indexing, a corpus of documents, and the checksums of its content."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, Literal, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from threefold.checksums import checksum_of
from threefold.data.conversations import ChatTemplate
from threefold.data.tokenizer import TextRule, load_tokenizer
from threefold.errors import UserError
from threefold.files import STRICT, require_file, shown
from threefold.random import Int64Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer


META_FILE: Final = "meta.json"
TOKENS_FILE: Final = "tokens.bin"
DOCUMENTS_FILE: Final = "documents.bin"
LOSS_MASK_FILE: Final = "loss_mask.bin"
TOKENIZER_FILE: Final = "tokenizer.json"

DOCUMENT_DTYPE: Final = "<i8"
TOKEN_DTYPES: Final = {"uint16": "<u2", "int32": "<i4"}


def dtype_for(vocab_size: int) -> Literal["uint16", "int32"]:
    """Return the key of `TOKEN_DTYPES` for tokens of this vocabulary; the bound is that of Fleet's token files."""
    return "uint16" if vocab_size < 65_500 else "int32"


def damaged(path: Path, remedy: str) -> str:
    return f"{shown(path)} is damaged (its checksum is not the one that was written); {remedy}"


class DocumentWriter(ExitStack):
    """Writer of documents into a folder: their tokens, start positions (file `starts`) and, if asked, loss mask."""

    def __init__(self, folder: Path, starts: str = DOCUMENTS_FILE, with_mask: bool = False) -> None:
        super().__init__()
        self.tokens = self.documents = 0
        names = [TOKENS_FILE, starts, *([LOSS_MASK_FILE] if with_mask else [])]
        with ExitStack() as files:  # closed at once if one of them cannot be opened
            self._files = [files.enter_context((folder / name).open("wb")) for name in names]
            self.push(files.pop_all())
        self._files[1].write(np.zeros(1, dtype=DOCUMENT_DTYPE).tobytes())

    def write(
        self, tokens: NDArray[np.integer], lengths: NDArray[np.integer], counted: NDArray[np.uint8] | None = None
    ) -> None:
        """Write documents, back to back in `tokens`; `counted` is 1 where a token counts for the loss."""
        ends = self.tokens + np.cumsum(lengths)
        for file, values in zip(self._files, (tokens, ends.astype(DOCUMENT_DTYPE), counted), strict=False):
            file.write(np.ascontiguousarray(values).data)
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + len(lengths)


class StoredArray:
    """One-dimensional array of numbers in a regular file that is opened once and read on indexing.

    Indexing returns read-only data in memory: an integer gives a number; a slice of step 1 or an integer array (of any
    shape) gives an array. Safe to use from several threads and after a fork. UserError if the file is too short.
    """

    def __init__(self, path: Path, dtype: DTypeLike, count: int, offset: int = 0) -> None:
        self.path, self.dtype, self.count, self.offset = path, np.dtype(dtype), count, offset
        require_file(path)
        try:
            self._file: IO[bytes] = path.open("rb", buffering=0)
        except OSError as error:
            raise UserError(f"Cannot read {shown(path)}: {error.strerror}.") from None
        self._handle, self.nbytes = self._file.fileno(), self.count * self.dtype.itemsize
        self._end = self.offset + self.nbytes
        if os.fstat(self._handle).st_size < self._end:
            raise self._truncated()

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
            values = np.empty(1, dtype=self.dtype)
            self._read(range(self.count)[index], values)
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
            # Reading a gap of a page is faster than another call; at most 2^20 numbers are read together across gaps.
            apart = (after <= before) | (after - before > 1 << 12) | (before >> 20 != after >> 20)
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
                got = os.preadv(self._handle, [view[: 1 << 30]], place)  # Linux returns less than 2 GiB
            except OSError as error:
                raise UserError(f"Cannot read {shown(self.path)}: {error.strerror}.") from None
            if not got:
                raise self._truncated()
            view, place = view[got:], place + got

    def _truncated(self) -> UserError:
        size = os.fstat(self._handle).st_size
        return UserError(
            f"{shown(self.path)} holds {size:,} bytes and must hold {self._end:,}, so it was truncated; copy it "
            "again, or make it again."
        )


def load_column(path: Path, dtype: DTypeLike, count: int, offset: int = 0) -> NDArray[Any]:
    """Load numbers that are accessed throughout: into memory, once per rank, or memory-mapped above 256 MiB."""
    stored = StoredArray(path, dtype, count, offset)
    if stored.nbytes <= 1 << 28:
        return stored[:]
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


TokenArray = NDArray[np.integer] | StoredArray  # token ids, in memory or in a file that is read on indexing


@dataclass(frozen=True, eq=False)
class StoredTokens:
    """Content of token files of any format, without facts that come from elsewhere, such as the vocabulary."""

    path: Path
    format: str
    files: tuple[Path, ...]  # the token file first
    tokens: TokenArray  # [N], read only; in memory only if the format requires it
    sequences: Int64Array  # [S + 1], start of each in `tokens`; the last is N; they may be empty
    document_sequences: Int64Array | None = None  # [D + 1], first of each document, then S; None if each is a document
    modes: NDArray[np.int8] | None = None  # [S], of Megatron-LM's sequences
    notes: tuple[str, ...] = ()  # sentences that a user should know about how these files are read

    @cached_property
    def documents(self) -> Int64Array:
        """Start of each document in `tokens`, int64 [D + 1]; the last is N. Documents may be empty."""
        return self.sequences if self.document_sequences is None else self.sequences[self.document_sequences]


@dataclass(frozen=True)
class Content:
    """Data type and checksums of the content of one corpus of a run."""

    dtype: Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    documents: str  # of the document starts as little-endian int64, and of everything else but the tokens
    tokens: str | None = None  # little endian in their type; None until all are read, if no file keeps it
    loss_mask: str | None = None
    __pydantic_config__: ClassVar[Any] = STRICT


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Tokens to train on, from files of any format: document d is tokens[documents[d]:documents[d + 1]]."""

    path: Path
    files: tuple[Path, ...]  # the token file first
    tokens: TokenArray  # [N], read only, usually in a file
    documents: NDArray[np.int64]  # [D + 1]; documents may be empty
    vocab_size: int
    eod: int | None
    tokenizer_file: Path | None
    remedy: str  # how to replace a damaged file, as the end of a sentence
    rule: TextRule
    loss_mask: NDArray[np.uint8] | StoredArray | None = None  # [N], 1 where a token counts; None for plain text
    template: ChatTemplate | None = None
    holds_pairs: bool = False  # documents 2 n and 2 n + 1 are the chosen and the rejected one of a pair
    checksums: Mapping[str, str] = field(default_factory=dict)  # by file name, as far as they are kept

    @property
    def holds_chat(self) -> bool:
        return self.loss_mask is not None

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        return None if self.tokenizer_file is None else load_tokenizer(self.tokenizer_file, "the tokenizer")

    @cached_property
    def tokenizer_sha256(self) -> str | None:
        return None if self.tokenizer_file is None else hashlib.sha256(self.tokenizer_file.read_bytes()).hexdigest()

    @cached_property
    def content(self) -> Content:
        """Checksums that the files keep; the one of the document starts is always known."""
        documents = self.checksums.get(self.files[-1].name)
        if not documents:
            documents = checksum_of(np.ascontiguousarray(self.documents, dtype=DOCUMENT_DTYPE).data)
        mask = self.checksums.get(LOSS_MASK_FILE) if self.holds_chat else None
        dtype: Any = self.tokens.dtype.name
        return Content(dtype, documents, self.checksums.get(self.files[0].name), mask)

    def check_tokens(self, tokens: NDArray[np.integer], start: int) -> None:
        """Check tokens that start at position `start`. Raises UserError if one is outside the vocabulary."""
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            place = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            raise self.outside(int(tokens[place]), start + place)

    def check_samples(self, tokens: Int64Array, places: Int64Array, indices: Int64Array, split: str) -> None:
        """Check the tokens of samples, int64 [rows, columns]. Raises UserError if one is outside the vocabulary.

        `places`, of the same shape, are their positions in the corpus; `indices`, int64 [rows], each row's sample.
        """
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            row, column = np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0]
            sample = f", sample {indices[row]:,} of the {split} split"
            raise self.outside(int(tokens[row, column]), int(places[row, column]), sample)

    def document_of(self, place: int) -> str:
        return f"document {int(np.searchsorted(self.documents, place, side='right')) - 1:,}"

    def outside(self, token: int, place: int, sample: str = "") -> UserError:
        """Return the error for a token outside the vocabulary; `sample` names its sample, after a comma and a space."""
        return UserError(
            f"{shown(self.files[0])} holds token {token:,} at position {place:,} ({self.document_of(place)}{sample}), "
            f"outside the vocabulary of {self.vocab_size:,} tokens; {self.remedy}"
        )
