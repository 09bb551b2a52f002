"""`threefold data verify`: one flipped bit in any file is found and the file named; whole files are passed."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from tests.support.damage import flip
from tests.support.other_systems import write_fleet, write_megatron
from tests.support.words import words
from threefold.convert.json_lines import JsonLines
from threefold.convert.tokens import to_threefold
from threefold.data.corpus import DOCUMENTS_FILE, META_FILE, TOKENS_FILE
from threefold.data.formats.threefold_folder import CHECKED, TokenFiles
from threefold.errors import UserError
from threefold.output import SILENT
from threefold.report.tokens import audit

FLIPS = 60


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    words(300, "<|endoftext|>").save(str(path))
    return path


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Path) -> Path:
    draw = np.random.default_rng(5)
    source = write_megatron(tmp_path / "m", [[[*draw.integers(1, 300, 40).tolist(), 0]] for _ in range(50)])
    to_threefold(source, tmp_path / "tokens", tokenizer, None, False, SILENT)
    return tmp_path / "tokens"


def problems(path: Path, tokenizer: Path | None = None) -> list[str]:
    return [one.problem for one in audit(path, tokenizer, SILENT) if one.problem]


def flips(folder: Path) -> list[tuple[Path, int]]:
    """Bits drawn from all files alike, whatever their sizes."""
    draw = random.Random(20)
    files = sorted(path for path in folder.iterdir())
    return [(path := files[n % len(files)], draw.randrange(8 * path.stat().st_size)) for n in range(FLIPS)]


def test_whole_files_are_passed(folder: Path) -> None:
    found = audit(folder, None, SILENT)
    assert {one.path.name for one in found} == {META_FILE, *CHECKED}
    assert {one.found for one in found} == {"as written"}


def test_each_flipped_bit_of_a_token_folder_is_found(folder: Path) -> None:
    for path, bit in flips(folder):
        flip(path, bit)
        (sentence,) = problems(folder)
        assert path.name in sentence
        assert "\n" not in sentence
        flip(path, bit)
    assert problems(folder) == []


def test_a_moved_bound_of_documents_is_found_on_opening(folder: Path) -> None:
    """One that is still in order, and not at the ends, where it would show without a checksum."""
    TokenFiles.open(folder)
    starts = np.fromfile(folder / DOCUMENTS_FILE, dtype="<i8")
    starts[20] += 1
    starts.tofile(folder / DOCUMENTS_FILE)
    with pytest.raises(UserError, match=rf"{DOCUMENTS_FILE} is damaged \(its checksum is not the one that was written"):
        TokenFiles.open(folder)


@pytest.mark.slow
def test_each_flipped_bit_of_a_cache_is_found(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": "w5 w7 w9"}) + "\n" for _ in range(200)))
    lines = JsonLines(path, tokenizer)
    entry = lines.encoded(16, SILENT).files[0].parent
    assert problems(path) == problems(entry) == problems(entry.parent) == []
    whole = lines.encoded(16, SILENT).tokens[:]
    for file, bit in flips(entry):
        content = file.read_bytes()
        flip(file, bit)
        (sentence,) = problems(path)
        assert str(entry) in sentence
        assert file.name in sentence
        # A run encodes the lines again unless only the tokens, which it checks while it trains, are damaged.
        if file.name != TOKENS_FILE:
            assert np.array_equal(lines.encoded(16, SILENT).tokens[:], whole)
        file.write_bytes(content)
    assert problems(path) == []


def test_each_flipped_bit_of_the_hash_of_encoded_lines_is_found(tmp_path: Path, tokenizer: Path) -> None:
    """It says which entry of the cache is that of the lines."""
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"text": "w5 w7 w9"}) + "\n")
    os.utime(path, (1e9, 1e9))  # or the file may still change, and no hash is kept
    lines = JsonLines(path, tokenizer)
    (stamp,) = lines.encoded(16, SILENT).files[0].parent.parent.glob("*.hash")
    assert stamp in [one.path for one in audit(path, None, SILENT)]
    content = stamp.read_bytes()
    for bit in range(0, 8 * len(content), len(content)):
        flip(stamp, bit)
        (sentence,) = problems(path)
        assert str(stamp) in sentence
        stamp.write_bytes(content)
    assert problems(path) == []


def test_files_of_other_systems(tmp_path: Path, tokenizer: Path) -> None:
    for write in (write_megatron, write_fleet):
        path = write(tmp_path / write.__name__ / "d", [[[5, 6, 0]], [[7, 299]]])
        assert problems(path) == problems(path, tokenizer) == []
        path = write(tmp_path / write.__name__ / "e", [[[5, 6, 0]], [[7, 300]]])
        assert problems(path) == []
        (sentence,) = problems(path, tokenizer)
        assert "holds token 300 at position 4 (document 1), outside the vocabulary of 300 tokens" in sentence
    (tmp_path / "write_megatron" / "d.bin").write_bytes(b"123")
    assert "has 3 bytes" in problems(tmp_path / "write_megatron" / "d")[0]


def test_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    for path, message in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "holds no token files"),
        (tmp_path / "a.jsonl", "no run has encoded these JSON lines yet"),
    ):
        with pytest.raises(UserError, match=message):
            audit(path, None, SILENT)
