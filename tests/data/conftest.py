"""Token files made by hand, so that the reading side is tested against tokens that the test chose."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from threefold.data.corpus import (
    DOCUMENT_DTYPE,
    DOCUMENTS_FILE,
    META_FILE,
    TOKEN_DTYPES,
    TOKENIZER_FILE,
    TOKENS_FILE,
    dtype_for,
)
from threefold.data.formats.threefold_folder import Meta, TokenFiles, file_checksums

EOD = 0
WriteTokenFiles = Callable[..., TokenFiles]


@pytest.fixture
def write_token_files(tmp_path: Path) -> WriteTokenFiles:
    """A function (documents, vocab_size) -> TokenFiles; each document is a list of tokens without its end."""

    def write(documents: Sequence[Sequence[int]], vocab_size: int = 1000) -> TokenFiles:
        folder = tmp_path / f"tokens-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        dtype = dtype_for(vocab_size)
        ended = [[*document, EOD] for document in documents]
        starts = np.cumsum([0, *map(len, ended)])
        np.concatenate(ended).astype(TOKEN_DTYPES[dtype]).tofile(folder / TOKENS_FILE)
        starts.astype(DOCUMENT_DTYPE).tofile(folder / DOCUMENTS_FILE)
        tokenizer = (
            Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w1")).to_str().encode()
        )
        (folder / TOKENIZER_FILE).write_bytes(tokenizer)
        sha256 = hashlib.sha256(tokenizer).hexdigest()
        Meta(dtype, vocab_size, EOD, int(starts[-1]), len(documents), 1, sha256, (), file_checksums(folder)).write(
            folder / META_FILE
        )
        return TokenFiles.open(folder)

    return write


@pytest.fixture
def random_documents() -> Callable[..., list[list[int]]]:
    """A function (count, longest, seed) -> documents of 1 to `longest` random tokens below 1000, none the end."""

    def make(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
        random = np.random.default_rng(seed)
        return [random.integers(1, 1000, random.integers(1, longest + 1)).tolist() for _ in range(count)]

    return make
