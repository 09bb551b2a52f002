"""Token files made by hand, so that the reading side is tested against tokens that the test chose."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.words import words
from tests.train.support import write_ids
from threefold.data.formats.threefold_folder import TokenFiles

EOD = 0
WriteTokenFiles = Callable[..., TokenFiles]


@pytest.fixture
def write_token_files(tmp_path: Path) -> WriteTokenFiles:
    """A function (documents, vocab_size) -> TokenFiles; each document is a list of tokens without its end."""

    def write(documents: Sequence[Sequence[int]], vocab_size: int = 1000) -> TokenFiles:
        folder = tmp_path / f"tokens-{len(list(tmp_path.iterdir()))}"
        return TokenFiles.open(write_ids(folder, documents, words(vocab_size), EOD))

    return write


@pytest.fixture
def random_documents() -> Callable[..., list[list[int]]]:
    """A function (count, longest, seed) -> documents of 1 to `longest` random tokens below 1000, none the end."""

    def make(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
        random = np.random.default_rng(seed)
        return [random.integers(1, 1000, random.integers(1, longest + 1)).tolist() for _ in range(count)]

    return make
