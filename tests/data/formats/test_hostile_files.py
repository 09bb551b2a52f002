"""What cannot be in token files is one sentence: wrong types, pipes and folders in place of files, endless names."""

import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.other_systems import npy, write_fleet, write_fleet_npz, write_megatron
from threefold.data.audit import audit
from threefold.data.corpus import META_FILE
from threefold.data.formats.paddlefleetx import read_paddlefleetx
from threefold.data.formats.registry import open_corpus, read_stored
from threefold.data.formats.threefold_folder import TokenFiles, file_checksums
from threefold.errors import UserError
from threefold.output import SILENT

WRONG = ["null", "[]", "{}", '"x"', "-1", "1.5", "1e400", "true", "9" * 4000, "9" * 5000, "NaN", "[" * 100_000]


def sentence_of(call: Callable[[], object]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


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


def test_every_field_of_meta_with_every_wrong_value(folder: Path) -> None:
    meta = folder / META_FILE
    facts: dict[str, Any] = json.loads(meta.read_text())
    facts["sources"] = [{"name": "a", "bytes": 1, "documents": 1, "sha256": "0"}]
    places = [(facts, name) for name in facts] + [(facts["sources"][0], name) for name in facts["sources"][0]]
    harmless = []
    for holder, name in places:
        kept = holder[name]
        for value in WRONG:
            holder[name] = "@"
            meta.write_text(json.dumps(facts).replace('"@"', value))
            sentence = sentence_of(lambda: TokenFiles.open(folder))
            assert "\n" not in sentence
            assert len(sentence) < 700
            if not sentence:
                harmless.append((name, value))
        holder[name] = kept
    # There may be no sources, nothing before a text, and any text may be a file's name or its hash.
    assert harmless == [("sources", "[]"), ("beginning", "[]"), ("name", '"x"'), ("sha256", '"x"')]


def test_a_field_that_is_missing(folder: Path) -> None:
    facts = json.loads((folder / META_FILE).read_text())
    of_later = {"special_tokens", "beginning", "loss_mask"}  # folders of older versions do without
    for name in facts:
        (folder / META_FILE).write_text(json.dumps({key: value for key, value in facts.items() if key != name}))
        if name in of_later:
            assert len(TokenFiles.open(folder).tokens) == facts["tokens"]
        else:
            assert META_FILE in refused(lambda: TokenFiles.open(folder))


def test_meta_edited_by_hand(folder: Path) -> None:
    meta = TokenFiles.open(folder).meta
    type(meta)(**{**vars(meta), "checksums": file_checksums(folder)}).write(folder / META_FILE)
    text = (folder / META_FILE).read_text()
    (folder / META_FILE).write_text(text.replace('"text_bytes": 1', '"text_bytes": 2'))
    assert "its checksum is not the one that was written" in refused(lambda: TokenFiles.open(folder))


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "dangling", "loop", "empty"])
def test_something_else_in_place_of_a_file(tmp_path: Path, folder: Path, kind: str) -> None:
    paths = [folder / name for name in ("meta.json", "tokens.bin", "documents.bin", "tokenizer.json")]
    write_megatron(tmp_path / "m" / "d", [[[5, 6]]])
    write_fleet(tmp_path / "f" / "d", [[[5, 6]]])
    write_fleet_npz(tmp_path / "l" / "d", [[[5, 6]]])
    paths += [*(tmp_path / "m").iterdir(), *(tmp_path / "f").iterdir(), *(tmp_path / "l").iterdir()]
    for path in paths:
        kept = path.with_name("kept")
        path.rename(kept)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "dangling":
            path.symlink_to("nowhere")
        elif kind == "loop":
            path.symlink_to(path)
        else:
            path.touch()
        place = path.parent if path.parent == folder else path.parent / "d"
        assert str(path.parent) in refused(lambda place=place: open_corpus(place, vocab_size=1000))
        if kind != "folder":
            problems = [one.problem for one in _audited(place) if one.problem]
            assert len(problems) == 1
        path.rmdir() if kind == "folder" else path.unlink()
        kept.rename(path)


def _audited(place: Path) -> list[Any]:
    try:
        return audit(place, None, SILENT)
    except UserError as error:
        return [type("Refused", (), {"problem": str(error)})]


@pytest.mark.parametrize("path", ["x" * 5000, "/".join(["y" * 100] * 50), "x\0y"])
def test_paths_that_cannot_be(path: str) -> None:
    for call in (read_stored, open_corpus, lambda path: audit(path, None, SILENT)):
        refused(lambda call=call: call(Path(path)))


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
