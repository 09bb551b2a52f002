"""Documents come out of files of every kind, and a malformed file is named with its line."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
import zstandard

from threefold.data import sources
from threefold.data.sources import SourceReader, find_inputs
from threefold.errors import UserError

LINES = '{"text": "One."}\n\n{"text": "Zwei: ü, 日本.", "id": 7}\n{"text": "  "}\n{"text": "Three\\nlines\\n"}'
DOCUMENTS = ["One.", "Zwei: ü, 日本.", "Three\nlines\n"]


def documents(path: Path, key: str = "text") -> list[str]:
    return list(SourceReader(path, key, lambda size: None))


def stored(folder: Path, name: str, text: str) -> Path:
    data = text.encode()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):
        data = zstandard.compress(data)
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.JSONL", "a.jsonl.gz", "a.json.zst", "b.v2.jsonl"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = stored(tmp_path, name, LINES)
    read: list[int] = []
    reader = SourceReader(path, "text", read.append)
    assert list(reader) == DOCUMENTS
    assert reader.documents == 3
    assert sum(read) == reader.bytes == path.stat().st_size
    assert reader.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.TXT.ZST".lower()])
def test_a_text_file_is_a_document(tmp_path: Path, name: str) -> None:
    assert documents(stored(tmp_path, name, "To be,\r\nor not to be.\n\nAct II\n")) == [
        "To be,\nor not to be.\n\nAct II\n"
    ]


def test_a_text_file_may_mark_its_documents(tmp_path: Path) -> None:
    text = "Once.\n<|endoftext|>\n\n<|endoftext|>\nTwice <|endoftext|> here.\n<|endoftext|>"
    assert documents(stored(tmp_path, "a.txt", text)) == ["Once.\n", "Twice <|endoftext|> here.\n"]


def test_a_long_text_is_cut_between_paragraphs_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"Paragraph {i}.\nIt has two lines.\n\n" for i in range(20_000))
    found = documents(stored(tmp_path, "a.txt", text))
    assert "".join(found) == text
    assert len(found) > 5
    assert all(document.endswith("\n\n") and 65_536 <= len(document) < 65_700 for document in found[:-1])


@pytest.mark.parametrize("unit", ["no blank line anywhere\n", "no line at all "])
def test_a_text_without_paragraphs_is_cut_all_the_same(tmp_path: Path, unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    found = documents(stored(tmp_path, "a.txt", text))
    assert "".join(found) == text
    assert max(map(len, found)) <= 270_000


def test_several_compressed_frames_in_one_file(tmp_path: Path) -> None:
    for suffix, compress in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(compress(b"first half, ") + compress(b"") + compress(b"second half"))
        assert documents(path) == ["first half, second half"]


def test_a_byte_order_mark_and_half_a_surrogate_pair(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "cut \\ud83d off"}\n')
    assert documents(path) == ["cut ? off"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"a\.jsonl:2 is not JSON .* every line must be one JSON object"),
        ("[\n", r"a\.jsonl:1 is not JSON"),
        ('["a"]\n', r"a\.jsonl:1 is not a JSON object"),
        ('\n\n{"body": "a", "id": 1}\n', r'a\.jsonl:3 has no key "text" \(its keys: "body", "id"\); .* --key'),
        ("{}\n", r'a\.jsonl:1 has no key "text" \(its keys: none\)'),
        ('{"text": ["a"]}\n', r'a\.jsonl:1 has no text under "text" but \["a"\]; it must be a string'),
        ("[" * 100_000 + "\n", r"a\.jsonl:1 is not JSON"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        documents(stored(tmp_path, "a.jsonl", text))
    assert "\n" not in str(caught.value)


def test_another_key(tmp_path: Path) -> None:
    assert documents(stored(tmp_path, "a.jsonl", json.dumps({"body": "x", "text": "y"})), key="body") == ["x"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_truncated_and_foreign_files_are_refused(tmp_path: Path, name: str) -> None:
    lines = "".join(json.dumps({"text": hashlib.sha256(str(i).encode()).hexdigest()}) + "\n" for i in range(5000))
    path = stored(tmp_path, name, lines)
    whole = path.read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], whole[:10], b"not compressed at all"):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.jsonl\.(gz|zst) cannot be read .*truncated"):
            documents(path)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text"):
        documents(path)


def test_folders_are_searched_in_order_and_without_token_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "sub/c.json.gz", "sub/notes.md", ".hidden.txt", "tokens/meta.json", "d.txt.bz2"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "tokens/tokens.bin").touch()
    (tmp_path / "tokens/tokenizer.json").touch()
    names = ["a.jsonl", "b.txt", "sub/c.json.gz"]
    assert find_inputs([tmp_path]) == [tmp_path / name for name in names]
    assert find_inputs([tmp_path / "b.txt", tmp_path])[0] == tmp_path / "b.txt"
    assert len(find_inputs([tmp_path / "b.txt", tmp_path])) == 3


def test_inputs_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"input .*gone\.txt does not exist"):
        find_inputs([tmp_path / "gone.txt"])
    with pytest.raises(UserError, match=r"holds no file to read; it needs \.jsonl, \.json, \.txt"):
        find_inputs([tmp_path])
    (tmp_path / "a.pdf").touch()
    with pytest.raises(UserError, match=r"a\.pdf is of an unknown kind; it must end in .jsonl"):
        find_inputs([tmp_path / "a.pdf"])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_that_only_compression_makes_small_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of 600 MB in half a megabyte is not read to its end, also where only the first line is wanted."""
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 1 << 16)
    long = '{"text": "' + "a" * (1 << 22) + '"}\n'
    path = stored(tmp_path, name, '{"text": "short"}\n' + long)
    assert path.stat().st_size < 1 << 15
    with pytest.raises(UserError, match=rf"{name}:2 has more than 65,536 characters, .* cut it into several"):
        documents(path)
    with pytest.raises(UserError, match=rf"{name}:1 has more than 65,536 characters"):
        sources.holds_chat(stored(tmp_path, f"b{name}", long), "text")


@pytest.mark.parametrize("depth", [90, 450, 100_000])
def test_conversations_that_are_nested_deeply_are_read_or_refused(tmp_path: Path, depth: int) -> None:
    """What reads a message goes down two calls for each of its levels."""
    message = '{"role": "assistant", "content": "b", "deep": ' + "[" * depth + "]" * depth + "}"
    path = stored(tmp_path, "a.jsonl", '{"messages": [{"role": "user", "content": "a"}, ' + message + "]}\n")
    if depth == 90:
        assert len(documents(path)) == 1
        return
    with pytest.raises(UserError, match=r"a\.jsonl:1 is not JSON \(its JSON is nested too deeply\)"):
        documents(path)


def test_a_parquet_file_that_repeats_a_long_text_takes_the_memory_of_a_few(tmp_path: Path) -> None:
    """It has half a kilobyte, and all its rows together a gigabyte."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1024, arrow.int32()), arrow.array(["a" * (1 << 20)]))
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": rows}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1000
    read = iter(SourceReader(path, "text", lambda size: None))
    assert sum(len(next(read)) for _ in range(40)) == 40 << 20
    assert arrow.default_memory_pool().max_memory() < 300_000_000
