"""Token files, opened for reading: memory-mapped, so that opening costs the same at any size."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from threefold.data.chat_template import ChatTemplate
from threefold.data.corpus import Corpus, StoredTokens
from threefold.data.format import (
    DOCUMENT_DTYPE,
    DOCUMENTS_FILE,
    DTYPES,
    LOSS_MASK_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    Meta,
)
from threefold.errors import UserError

FOLDER_FORMAT: Final = "Threefold"
_AGAIN: Final = "prepare the data again with `threefold data prepare`"


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenFiles(Corpus):
    """A folder that `threefold data prepare` wrote, as a corpus.

    Its documents are memory-mapped like its tokens, none is empty, and each text ends with `eod`.

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
        tokens = _map(path / TOKENS_FILE, DTYPES[meta.dtype], meta.tokens)
        documents = _map(path / DOCUMENTS_FILE, DOCUMENT_DTYPE, meta.documents + 1)
        files = cls(
            path=path,
            meta=meta,
            tokens=tokens,
            documents=documents,
            vocab_size=meta.vocab_size,
            eod=meta.eod,
            tokenizer_file=path / TOKENIZER_FILE,
            remedy=_AGAIN,
            rule=meta.rule,
            loss_mask=_map(path / LOSS_MASK_FILE, "u1", meta.tokens) if meta.loss_mask else None,
            template=ChatTemplate.beside(path / TOKENIZER_FILE) if meta.loss_mask else None,
        )
        files._check()
        return files

    def stored(self) -> StoredTokens:
        """What the files hold, as of any other format."""
        files = (self.path / TOKENS_FILE, self.path / DOCUMENTS_FILE)
        return StoredTokens(self.path, FOLDER_FORMAT, files, self.tokens, self.documents)

    def _check(self) -> None:
        starts = self.documents
        if starts[0] != 0 or starts[-1] != self.meta.tokens or not np.all(np.diff(starts) > 0):
            raise UserError(f"{self.path / DOCUMENTS_FILE} does not fit {TOKENS_FILE}; {_AGAIN}")
        # Touching every document's end would read the whole file; its two ends show the usual damage.
        ends = () if self.holds_chat else (1, -1)  # conversations end as their template ends them
        if any(self.tokens[starts[d] - 1] != self.eod for d in ends) or not 0 <= self.eod < self.vocab_size:
            raise UserError(
                f"{self.path / TOKENS_FILE} has a document that does not end with token {self.eod}; {_AGAIN}"
            )
        if not self.tokenizer_file.is_file():
            raise UserError(f"{self.path} has no {TOKENIZER_FILE}; {_AGAIN}")
        if self.tokenizer_sha256 != self.meta.tokenizer_sha256:
            raise UserError(f"{self.tokenizer_file} is not the tokenizer that these tokens were made with; {_AGAIN}")


def _map(path: Path, dtype: str, count: int) -> NDArray:
    expected = count * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
    except OSError:
        raise UserError(f"{path} is missing; {_AGAIN}") from None
    if size != expected or count < 1:
        raise UserError(f"{path} holds {size:,} bytes and {expected:,} were written; {_AGAIN}")
    # A plain array over the map: np.memmap's own class costs a Python call for every slice taken.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))
