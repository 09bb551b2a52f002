"""The folders of `threefold data prepare`, opened for reading; tokens stay on disk, so that opening is fast."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from threefold.checksums import checksum
from threefold.data.chat.chat_template import ChatTemplate
from threefold.data.corpus import Corpus, StoredTokens
from threefold.data.formats.threefold_meta import Meta
from threefold.data.stored_array import StoredArray, load_column
from threefold.data.token_storage import (
    DOCUMENT_DTYPE,
    DOCUMENTS_FILE,
    DTYPES,
    LOSS_MASK_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
)
from threefold.errors import UserError
from threefold.files import require_file, shown

FOLDER_FORMAT: Final = "Threefold"
_AGAIN: Final = "prepare the data again with `threefold data prepare`"


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenFiles(Corpus):
    """A folder that `threefold data prepare` wrote, as a corpus.

    None of its documents is empty, and each text ends with `eod`.

    Attributes:
        path: the folder.
        meta: its facts.
        eod: id of the end-of-document token.
        tokenizer_file: the folder's own.
    """

    meta: Meta
    eod: int
    tokenizer_file: Path

    @classmethod
    def open(cls, path: Path | str) -> "TokenFiles":
        """Open and check the folder `path`.

        Raises:
            UserError: it is no folder of token files, or its files are truncated or contradict one another.
        """
        path = Path(path)
        meta = Meta.read(path)
        tokens_file, documents_file = path / TOKENS_FILE, path / DOCUMENTS_FILE
        _check_size(tokens_file, DTYPES[meta.dtype], meta.tokens)
        _check_size(documents_file, DOCUMENT_DTYPE, meta.documents + 1)
        files = cls(
            path=path,
            files=(tokens_file, documents_file),
            meta=meta,
            tokens=StoredArray(tokens_file, DTYPES[meta.dtype], meta.tokens),
            documents=load_column(documents_file, DOCUMENT_DTYPE, meta.documents + 1),
            vocab_size=meta.vocab_size,
            eod=meta.eod,
            tokenizer_file=path / TOKENIZER_FILE,
            remedy=_AGAIN,
            rule=meta.rule,
            loss_mask=_mask(path / LOSS_MASK_FILE, meta.tokens) if meta.loss_mask else None,
            template=ChatTemplate.beside(path / TOKENIZER_FILE) if meta.loss_mask else None,
            checksums=meta.checksums,
        )
        files._check()
        return files

    def stored(self) -> StoredTokens:
        """What the files hold, as of any other format."""
        return StoredTokens(self.path, FOLDER_FORMAT, self.files, self.tokens, self.documents)

    def _check(self) -> None:
        starts = self.documents
        for name in (DOCUMENTS_FILE, *((LOSS_MASK_FILE,) if self.holds_chat else ())):
            expected = self.checksums.get(name)
            if expected is not None and checksum(self.path / name) != expected:
                raise UserError(
                    f"{shown(self.path / name)} is damaged (its checksum is not the one that was written); {_AGAIN}"
                )
        if starts[0] != 0 or starts[-1] != self.meta.tokens or not np.all(np.diff(starts) > 0):
            raise UserError(f"{self.path / DOCUMENTS_FILE} does not fit {TOKENS_FILE}; {_AGAIN}")
        # Touching every document's end would read the whole file; its two ends show the usual damage.
        ends = () if self.holds_chat else (1, -1)  # conversations end as their template ends them
        if any(self.tokens[starts[d] - 1] != self.eod for d in ends) or not 0 <= self.eod < self.vocab_size:
            raise UserError(
                f"{self.path / TOKENS_FILE} has a document that does not end with token {self.eod}; {_AGAIN}"
            )
        if not os.path.lexists(self.tokenizer_file):
            raise UserError(f"{self.path} has no {TOKENIZER_FILE}; {_AGAIN}")
        require_file(self.tokenizer_file)
        if self.tokenizer_sha256 != self.meta.tokenizer_sha256:
            raise UserError(f"{self.tokenizer_file} is not the tokenizer that these tokens were made with; {_AGAIN}")


def _mask(path: Path, count: int) -> StoredArray:
    _check_size(path, "u1", count)
    return StoredArray(path, "u1", count)


def _check_size(path: Path, dtype: str, count: int) -> None:
    if not os.path.lexists(path):
        raise UserError(f"{shown(path)} is missing; {_AGAIN}")
    expected = count * np.dtype(dtype).itemsize
    if (size := require_file(path)) != expected:
        raise UserError(f"{shown(path)} holds {size:,} bytes and {expected:,} were written; {_AGAIN}")
