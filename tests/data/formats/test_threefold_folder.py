"""Token files open if they are whole, and say in one sentence what is wrong if they are not."""

import json
from pathlib import Path

import numpy as np
import pytest

from threefold.checksums import seal
from threefold.data.corpus import DOCUMENTS_FILE, META_FILE, TOKENIZER_FILE, TOKENS_FILE, dtype_for
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.errors import UserError

DOCUMENTS = [[1, 2, 3], [4], [5, 6]]


def test_documents_and_facts(write_token_files) -> None:
    files = write_token_files(DOCUMENTS)
    assert files.tokens.tolist() == [1, 2, 3, 0, 4, 0, 5, 6, 0]
    assert files.tokens.dtype == np.uint16
    assert files.documents.tolist() == [0, 4, 6, 9]
    assert (files.vocab_size, files.eod) == (1000, 0)
    assert files.tokenizer.id_to_token(5) == "w5"


def test_a_large_vocabulary_is_stored_in_32_bits(write_token_files) -> None:
    files = write_token_files([[70_000, 3]], vocab_size=70_001)
    assert files.tokens.dtype == np.int32
    assert files.tokens.tolist() == [70_000, 3, 0]
    assert (dtype_for(65_499), dtype_for(65_500)) == ("uint16", "int32")


def test_tokens_cannot_be_changed(write_token_files) -> None:
    with pytest.raises(ValueError, match="read-only"):
        write_token_files(DOCUMENTS).tokens[:][0] = 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def put(path: Path, place: int, value: int, dtype: str) -> None:
    array = np.fromfile(path, dtype=dtype)
    array[place] = value
    array.tofile(path)


def set_fact(path: Path, **facts: object) -> None:
    known = json.loads(path.read_text()) | facts
    path.write_text(json.dumps(seal({name: value for name, value in known.items() if name != "checksum"})))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: cut(folder / TOKENS_FILE), "tokens.bin holds 17 bytes and 18 were written"),
        (lambda folder: cut(folder / DOCUMENTS_FILE), "documents.bin holds 31 bytes and 32 were written"),
        (lambda folder: (folder / TOKENS_FILE).unlink(), "tokens.bin is missing"),
        (lambda folder: (folder / TOKENIZER_FILE).unlink(), "has no tokenizer.json"),
        (
            lambda folder: (folder / TOKENIZER_FILE).write_text("{}"),
            "not the tokenizer that these tokens were made with",
        ),
        (lambda folder: put(folder / DOCUMENTS_FILE, 1, 7, "<i8"), "documents.bin is damaged"),
        (lambda folder: put(folder / DOCUMENTS_FILE, 0, 1, "<i8"), "documents.bin is damaged"),
        (lambda folder: put(folder / TOKENS_FILE, 8, 1, "<u2"), "does not end with token 0"),
        (lambda folder: set_fact(folder / META_FILE, dtype="float"), "is damaged"),
        (lambda folder: set_fact(folder / META_FILE, tokens="many"), "is damaged"),
        (lambda folder: set_fact(folder / META_FILE, sources=None), "is damaged"),
        (
            lambda folder: set_fact(folder / META_FILE, vocab_size=1 << 40, eod=1 << 39),
            "its vocab_size is 1099511627776",
        ),
        (lambda folder: set_fact(folder / META_FILE, beginning=[1 << 40]), r"its beginning is \[1099511627776\]"),
        (lambda folder: set_fact(folder / META_FILE, surprise=1), "is damaged"),
        (
            lambda folder: set_fact(folder / META_FILE, version=3),
            "has version 3 .* reads version 1; prepare",
        ),
        (lambda folder: set_fact(folder / META_FILE, format="other"), "describes no token files"),
        (lambda folder: (folder / META_FILE).write_text("{"), "Cannot read .*meta.json: it is not JSON"),
        (lambda folder: (folder / META_FILE).unlink(), "holds no token files"),
    ],
)
def test_damaged_files_are_refused(write_token_files, damage, message: str) -> None:
    folder = write_token_files(DOCUMENTS).path
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        TokenFiles.open(folder)
    assert "\n" not in str(caught.value)
    assert "prepare" in str(caught.value) or "version" in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none does not exist; make token files with `threefold data prepare INPUT"):
        TokenFiles.open(tmp_path / "none")
