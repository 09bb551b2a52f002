"""What cannot be in token files is one sentence: wrong types, pipes and folders in place of files, endless names."""

import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.other_systems import npy, write_fleet, write_fleet_npz
from threefold.convert.paddlefleetx_tokens import read_paddlefleetx
from threefold.data.corpus import META_FILE
from threefold.data.formats.registry import read_stored
from threefold.data.formats.threefold_folder import TokenFiles, file_checksums
from threefold.errors import UserError


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 700
    return sentence


@pytest.fixture
def folder(write_token_files) -> Path:
    return write_token_files([[1, 2, 3], [4], [5, 6]]).path


def test_meta_edited_by_hand(folder: Path) -> None:
    meta = TokenFiles.open(folder).meta
    type(meta)(**{**vars(meta), "checksums": file_checksums(folder)}).write(folder / META_FILE)
    text = (folder / META_FILE).read_text()
    (folder / META_FILE).write_text(text.replace('"text_bytes": 1', '"text_bytes": 2'))
    assert "its checksum is not the one that was written" in refused(lambda: TokenFiles.open(folder))


def test_headers_of_numpy_that_lie(tmp_path: Path) -> None:
    ids = tmp_path / "d_ids.npy"
    for header, rule in (
        (b"(-2,)", "cannot be read"),
        (b"(99,)", "its header says 99 numbers"),
        (b"(2.0,)", "cannot be read"),
        (b"((2,),)", "cannot be read"),
        (b"(True,)", "cannot be read"),
    ):
        write_fleet(tmp_path / "d", [[[5, 6]]])
        content = ids.read_bytes()
        place = content.index(b"(2,)")
        grown = content[:place] + header + content[place + 4 :]
        ids.write_bytes(grown.replace(b" " * (len(header) - 4), b"", 1) if len(header) > 4 else grown)
        assert rule in refused(lambda: read_stored(tmp_path / "d"))
    for dtype in ("|O", "<U4", "<c8", "|V8", "<M8[s]", "|b1"):
        write_fleet(tmp_path / "d", [[[5, 6]]])
        ids.write_bytes(npy([5, 6], "<u2").replace(b"'<u2'", f"'{dtype}'".encode(), 1).replace(b"'<u2'", b""))
        assert "d_ids.npy" in refused(lambda: read_stored(tmp_path / "d"))
    (tmp_path / "x").mkdir()
    np.save(tmp_path / "x" / "d_ids.npy", np.array([{"a": 1}], dtype=object))
    shutil.copy(tmp_path / "d_idx.npz", tmp_path / "x" / "d_idx.npz")
    assert "and not whole numbers" in refused(lambda: read_stored(tmp_path / "x" / "d"))


def test_an_archive_that_unpacks_to_more_than_it_can(tmp_path: Path) -> None:
    path = tmp_path / "d_ids.npz"
    body = npy([7] * 1000, "<u2")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", body.replace(b"(1000,)", b"(9999999999,)").replace(b" " * 7, b" ", 1))
        archive.writestr("lens.npy", npy([1000], "<i4"))
    assert "its header says 9,999,999,999" in refused(lambda: read_stored(path))
    content = path.read_bytes()
    for at in (content.index(b"PK\x01\x02") + 24,):  # the size that the directory tells
        path.write_bytes(content[:at] + struct.pack("<I", 0xFFFFFFF0) + content[at + 4 :])
        assert "d_ids.npz cannot be read" in refused(lambda: read_stored(path))


def test_members_of_an_archive_that_overlap(tmp_path: Path) -> None:
    path = Path(f"{write_fleet_npz(tmp_path / 'd', [[[5, 6]]])}_ids.npz")
    content = bytearray(path.read_bytes())
    first = content.index(b"PK\x01\x02")
    second = content.index(b"PK\x01\x02", first + 4)
    content[second + 42 : second + 46] = content[first + 42 : first + 46]
    path.write_bytes(content)
    assert "is not where the directory says" in refused(lambda: read_stored(path))


def test_an_index_of_another_checksum_is_refused(tmp_path: Path) -> None:
    """A bound of a document that still rises would move tokens from one document to the next, without a word."""
    prefix = write_fleet(tmp_path / "text", [[[1, 2], [3]], [[4, 5, 6]], [[7], [8], [9, 10]]])
    index = tmp_path / "text_idx.npz"
    content = bytearray(index.read_bytes())
    place = content.rindex(np.array([0, 2, 3, 6]).tobytes())
    content[place + 8] = 1  # the first document ends after one sequence
    index.write_bytes(content)
    with pytest.raises(UserError, match=r"text_idx\.npz cannot be read: Bad CRC-32 for file 'docs\.npy'"):
        read_paddlefleetx(prefix)
