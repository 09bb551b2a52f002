"""Token files, opened for reading: memory-mapped, so that opening costs the same at any size."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from threefold.data.format import DOCUMENT_DTYPE, DOCUMENTS_FILE, DTYPES, TOKENIZER_FILE, TOKENS_FILE, Meta
from threefold.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """A folder of token files.

    Attributes:
        path: the folder.
        meta: its facts.
        tokens: [meta.tokens] uint16 or int32, memory-mapped, read only.
        documents: int64 [meta.documents + 1], memory-mapped, read only: document d is
            tokens[documents[d]:documents[d + 1]].
    """

    path: Path
    meta: Meta
    tokens: NDArray[np.integer]
    documents: NDArray[np.int64]

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
        files = cls(path, meta, tokens, documents)
        files._check()
        return files

    @property
    def vocab_size(self) -> int:
        return self.meta.vocab_size

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""
        return self.meta.eod

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path / TOKENIZER_FILE))

    def _check(self) -> None:
        starts = self.documents
        if starts[0] != 0 or starts[-1] != self.meta.tokens or not np.all(np.diff(starts) > 0):
            raise UserError(f"{self.path / DOCUMENTS_FILE} does not fit {TOKENS_FILE}; {_AGAIN}")
        # Touching every document's end would read the whole file; its two ends show the usual damage.
        if any(self.tokens[starts[d] - 1] != self.eod for d in (1, -1)) or not 0 <= self.eod < self.vocab_size:
            raise UserError(
                f"{self.path / TOKENS_FILE} has a document that does not end with token {self.eod}; {_AGAIN}"
            )
        tokenizer = self.path / TOKENIZER_FILE
        if not tokenizer.is_file():
            raise UserError(f"{self.path} has no {TOKENIZER_FILE}; {_AGAIN}")
        if hashlib.sha256(tokenizer.read_bytes()).hexdigest() != self.meta.tokenizer_sha256:
            raise UserError(f"{tokenizer} is not the tokenizer that these tokens were made with; {_AGAIN}")


_AGAIN = "prepare the data again with `threefold data prepare`"


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
