"""`threefold data convert` and `show` over the files of all systems."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.other_systems import Documents, megatron_files, write_fleet, write_fleet_npz, write_megatron
from threefold.cli.main import app
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.errors import UserError

DOCUMENTS: Documents = [[[5, 6, 7, 0]], [[]], [[8], [9, 9, 0], []], [], [[4, 4]], [[i % 10 for i in range(70_000)]]]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture
def tokenizer(write_token_files) -> Path:
    """Ten words, of which w0 ends documents."""
    return write_token_files([[1]], vocab_size=10).path / "tokenizer.json"


@pytest.mark.parametrize("dtype", ["u1", "u2", "i4", "i8"])
def test_megatron_is_written_byte_for_byte(tmp_path: Path, dtype: str) -> None:
    modes = [0, 1, 0, 1, 1, 0, 1]
    for chosen in (None, modes):
        source = write_megatron(tmp_path / "a", DOCUMENTS, dtype, chosen)
        run("convert", source, "--to", "megatron", "--out", tmp_path / "new" / "b.bin", "--overwrite")
        expected = megatron_files(DOCUMENTS, dtype, chosen)
        assert tuple((tmp_path / "new" / f"b{e}").read_bytes() for e in (".bin", ".idx")) == expected
        assert len([path for path in (tmp_path / "new").iterdir() if not path.name.startswith(".")]) == 2


def test_fleet_to_megatron(tmp_path: Path) -> None:
    for number, (dtype, wanted) in enumerate((("<u2", "u2"), ("<i4", "i4"))):
        write_fleet(tmp_path / f"f{number}", DOCUMENTS, dtype)
        run("convert", tmp_path / f"f{number}", "--to", "megatron", "--out", tmp_path / "m", "--overwrite")
        assert ((tmp_path / "m.bin").read_bytes(), (tmp_path / "m.idx").read_bytes()) == megatron_files(
            DOCUMENTS, wanted
        )
    flat = [[[token for sequence in document for token in sequence]] for document in DOCUMENTS]
    write_fleet_npz(tmp_path / "z", flat)
    run("convert", tmp_path / "z_ids.npz", "--to", "megatron", "--out", tmp_path / "n")
    assert ((tmp_path / "n.bin").read_bytes(), (tmp_path / "n.idx").read_bytes()) == megatron_files(flat)


def test_a_folder_of_ours_to_megatron_and_back(tmp_path: Path, write_token_files) -> None:
    documents = [[1, 2, 3], [9], [4] * 70_000]
    files = write_token_files(documents, vocab_size=10)
    run("convert", files.path, "--to", "megatron", "--out", tmp_path / "m")
    expected = megatron_files([[[*document, 0]] for document in documents])
    assert ((tmp_path / "m.bin").read_bytes(), (tmp_path / "m.idx").read_bytes()) == expected
    arguments = ("--tokenizer", files.path / "tokenizer.json", "--eod", "w0")
    output = run("convert", tmp_path / "m", "--to", "threefold", "--out", tmp_path / "back", *arguments)
    assert "Left out" not in output
    assert "Gave" not in output
    for name in ("tokens.bin", "documents.bin", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (files.path / name).read_bytes()


def test_documents_that_our_format_cannot_hold(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_megatron(tmp_path / "m", DOCUMENTS, "i4")
    for name, chunk in (("whole", 1 << 22), ("in pieces", 5)):
        monkeypatch.setattr("threefold.convert.tokens._CHUNK", chunk)
        out = tmp_path / name
        output = run("convert", source, "--to", "threefold", "--out", out, "--tokenizer", tokenizer, "--eod", "w0")
        assert "4 documents, 70,012 tokens" in output
        assert "Left out 2 empty documents" in output
        assert "Gave 2 documents the end-of-document token" in output
        files = TokenFiles.open(out)
        long = [i % 10 for i in range(70_000)]
        assert files.tokens.tolist() == [5, 6, 7, 0, 8, 9, 9, 0, 4, 4, 0, *long, 0]
        assert files.documents.tolist() == [0, 4, 8, 11, 70_012]
        assert (files.meta.dtype, files.meta.sources[0].documents) == ("uint16", 6)


def test_what_cannot_be_converted(tmp_path: Path, tokenizer: Path) -> None:
    source = write_megatron(tmp_path / "m", [[[5, 11, 0]]])
    wrong = [
        (("--to", "threefold", "--out", tmp_path / "o"), r"comes without the tokenizer that --to threefold needs"),
        (("--to", "threefold", "--out", tmp_path / "o", "--tokenizer", tokenizer), r"none of the end-of-document"),
        (("--to", "threefold", "--out", tmp_path / "o", "--tokenizer", tmp_path / "x"), r"--tokenizer .*x does not"),
        (
            ("--to", "threefold", "--out", tmp_path / "o", "--tokenizer", tokenizer, "--eod", "w0"),
            r"m.bin holds token 11 at position 1 \(document 0\), outside the vocabulary of 10 tokens",
        ),
        (("--to", "megatron", "--out", tmp_path / "m"), r"--out .*m.idx is an input; choose another prefix"),
        (("--to", "threefold", "--out", tmp_path), r"--out .* contains .*m, which is read; choose a folder apart"),
    ]
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in wrong:
        with pytest.raises(UserError, match=message):
            run("convert", source, *arguments)
    np.savez(tmp_path / "u_ids.npz", ids=np.array([1, 2], dtype=np.uint64), lens=np.array([2], dtype=np.int32))
    with pytest.raises(UserError, match=r"holds uint64 tokens, for which Megatron-LM has no type code"):
        run("convert", tmp_path / "u", "--to", "megatron", "--out", tmp_path / "v")
    (tmp_path / "u_ids.npz").unlink()
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_show_of_every_format(tmp_path: Path, tokenizer: Path) -> None:
    documents = [*DOCUMENTS, *([[i % 10] * 5 + [0]] for i in range(20))]
    arguments = ("--sequence-length", 4, "--split", "1,1")
    for write, name in ((write_megatron, "Megatron-LM"), (write_fleet, "Fleet"), (write_fleet_npz, "Fleet, legacy")):
        flat = [[[token for sequence in document for token in sequence]] for document in documents]
        path = write(tmp_path / name / "d", flat if write is write_fleet_npz else documents)
        shown = run("show", path, *arguments)
        for fact in (
            f"format {name}",
            "longest document 70,000 tokens (document 5)",
            "empty documents 2",
            "tokens 70,130 (2,697 a document)",
            "stored as uint16, 140.3 kB",
            "vocabulary unknown without a tokenizer; the highest token is 9",
            "end of document unknown; 92% of the documents end with token 0",
            "documents tokens samples of 4",
        ):
            assert fact in shown, shown
        assert ("26, of 27 sequences" in shown) == (write is not write_fleet_npz)
        named = run("show", path, "--tokenizer", tokenizer, *arguments)
        assert "vocabulary 10 tokens" in named
        numbers = shown.rpartition("last label): ")[2].split()
        assert named.endswith(" ".join(f"w{number}" for number in numbers))
        assert len(numbers) == 5
    packed = write_fleet_npz(tmp_path / "packed", documents[:1] * 30, packed=True)
    assert "note packed_ids.npz is compressed, so every process unpacks its tokens" in run("show", packed, *arguments)


def test_a_negative_token_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"m.bin holds token -1 at position 2 \(document 0\), so it is damaged"):
        run("show", write_megatron(tmp_path / "m", [[[5, 6, -1]]], "i4"))


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    texts = ["one two", None, "", "three " * 50] * 600
    table = pyarrow.table({"text": texts, "body": pyarrow.array(texts, pyarrow.large_string()), "id": range(2400)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("key", ["text", "body"])
def test_parquet_is_prepared_like_json_lines(tmp_path: Path, parquet: Path, key: str) -> None:
    lines = [f'{{"{key}": "{text}"}}' for text in ("one two", "three " * 50)] * 600
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    for name in ("a.parquet", "b.jsonl"):
        options = ("--vocab-size", 270, "--key", key, "--workers", 1)
        run("prepare", tmp_path / name, "--out", tmp_path / f"{name}-tokens", *options)
    ours, expected = (TokenFiles.open(tmp_path / f"{name}-tokens") for name in ("a.parquet", "b.jsonl"))
    np.testing.assert_array_equal(ours.tokens, expected.tokens)
    np.testing.assert_array_equal(ours.documents, expected.documents)
    (source,) = ours.meta.sources
    assert (source.bytes, source.documents) == (parquet.stat().st_size, 1200)
    assert source.sha256 == hashlib.sha256(parquet.read_bytes()).hexdigest()


def test_parquet_that_cannot_be_read(tmp_path: Path, parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ("--out", tmp_path / "out", "--workers", 1)
    with pytest.raises(UserError, match=r'no column "none" \(its columns: "text", "body", "id"\); name the right one'):
        run("prepare", parquet, *out, "--key", "none")
    with pytest.raises(UserError, match=r'no text in column "id" but int64; name a column of strings with --key'):
        run("prepare", parquet, *out, "--key", "id")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(UserError, match=r'pip install "threefold\[parquet\]"'):
            run("prepare", parquet, *out)
    parquet.write_bytes(parquet.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a.parquet cannot be read as parquet \(.*\); it may be truncated") as caught:
        run("prepare", parquet, *out)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
