"""Checksums of a corpus's content: equal for equal tokens, whatever the format of their files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np

from threefold.data.corpus import Corpus, TokenArray
from threefold.data.formats.jsonl import EncodedLines
from threefold.data.stored_array import DOCUMENT_DTYPE, LOSS_MASK_FILE, TOKENS_FILE
from threefold.files import STRICT, checksum_of, checksum_of_blocks

TokenDtype = Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
_BLOCK: Final = 8 << 20


@dataclass(frozen=True)
class Content:
    """Data type and checksums of the content of one corpus of a run.

    Attributes:
        dtype: name of the type that the tokens are stored in.
        documents: checksum of the document starts as little-endian int64, and of everything else but the tokens.
        tokens: checksum of the tokens, little endian in their type; None until all are read, if no file keeps it.
        loss_mask: checksum of the loss mask; None if it is unknown or there is no mask.
    """

    dtype: TokenDtype
    documents: str
    tokens: str | None = None
    loss_mask: str | None = None
    __pydantic_config__: ClassVar[Any] = STRICT


@dataclass(frozen=True, eq=False)
class ReadCorpus:
    """A corpus whose content is checked while it is read.

    Attributes:
        files: the token file first, then the files that say where documents start.
        content: known facts about the content; its checksum of the tokens is the one recorded when they were written.
        remedy: how to replace a damaged file, as the end of a sentence.
    """

    files: tuple[Path, ...]
    tokens: TokenArray
    content: Content
    remedy: str

    @property
    def documents_file(self) -> Path:
        return self.files[-1]


def content_of(data: Corpus) -> ReadCorpus:
    """Return a corpus with the checksums that its files keep."""
    if isinstance(data, EncodedLines):
        known = dict(data.checksums)
        tokens, mask = known.pop(TOKENS_FILE, None), None
        documents = checksum_of("".join(f"{name} {known[name]}\n" for name in sorted(known)).encode()) if known else ""
    else:
        tokens, documents = data.checksums.get(data.files[0].name), data.checksums.get(data.files[-1].name) or ""
        if not documents:
            documents = checksum_of(np.ascontiguousarray(data.documents, dtype=DOCUMENT_DTYPE).data)
        mask = data.checksums.get(LOSS_MASK_FILE) if data.holds_chat else None
    dtype: Any = data.tokens.dtype.name
    return ReadCorpus(data.files, data.tokens, Content(dtype, documents, tokens, mask), data.remedy)


def checksum_of_tokens(tokens: TokenArray, dtype: str, advance: Callable[[int], None] = lambda size: None) -> str:
    """Compute the checksum of tokens as they are stored in a type. Raises UserError if their file cannot be read.

    Args:
        tokens: [N].
        dtype: name of the type.
        advance: called with the bytes of each block that was read.
    """
    little = np.dtype(dtype).newbyteorder("<")

    def blocks() -> Iterator[memoryview]:
        step = max(1, _BLOCK // tokens.dtype.itemsize)
        for start in range(0, len(tokens), step):
            block = np.ascontiguousarray(tokens[start : start + step])
            yield memoryview(np.ascontiguousarray(block.astype(little, copy=False)).data)
            advance(block.nbytes)

    return checksum_of_blocks(blocks())
