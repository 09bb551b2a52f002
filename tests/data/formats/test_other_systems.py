"""Token files of Megatron-LM and Fleet: every sample as plain Python reads it, and one sentence for each damage."""

import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.other_systems import (
    MEGATRON_CODES,
    Documents,
    fleet_parts,
    megatron_files,
    npy,
    npz,
    write_fleet,
    write_fleet_npz,
    write_megatron,
)
from tests.support.words import words
from threefold.data.corpus import StoredArray
from threefold.data.formats.registry import holds_tokens, open_corpus, read_stored
from threefold.data.loader import BatchSlice, Loader
from threefold.data.packed import PackedSamples
from threefold.data.samples import SPLITS, document_runs
from threefold.errors import UserError
from threefold.report.tokens import split_facts

EOD = 3


def corpus_of(largest: int, ended: bool, several: bool = False) -> Documents:
    """Empty documents at both ends and in the middle, one of 70,000 tokens, many short ones; tokens up to `largest`."""
    draw = random.Random(largest)
    lengths = [0, 5, 0, 0, 1, 70_000, 0, *(draw.randrange(30) for _ in range(60)), 9, 0]
    documents: Documents = []
    for length in lengths:
        tokens = [draw.randrange(4, largest) for _ in range(length)]
        tokens[:1] = [largest][:length]
        if ended and tokens:
            tokens[-1] = EOD
            tokens[length // 2] = EOD  # an end-of-document token may stand anywhere
        cut = draw.randrange(length + 1) if several else 0
        # Without several sequences an empty document is one empty sequence, with several it may be none at all.
        documents.append([tokens[:cut], [], tokens[cut:]] if several and length else [] if several else [tokens])
    return documents


Sample = tuple[list[int], list[int], list[int]]
"""Inputs, labels (-100 where they do not count), and the document of each input."""


def slow_samples(documents: Documents, members: Sequence[int], length: int, eod: int | None) -> list[Sample]:
    """Return the samples of the documents `members`, packed end to end, in plain Python.

    With an end-of-document token, the label after it does not count; without one, the label at the last token of each
    document does not.
    """
    stream: list[tuple[int, int, bool]] = []
    for member in members:
        tokens = [token for sequence in documents[member] for token in sequence]
        stream += [(token, member, place == len(tokens) - 1) for place, token in enumerate(tokens)]
    samples: list[Sample] = []
    for start in range(0, len(stream) - length, length):
        window = stream[start : start + length + 1]
        labels = []
        for (token, _, is_last), (following, _, _) in pairwise(window):
            is_end = token == eod if eod is not None else is_last
            labels.append(-100 if is_end else following)
        inputs = window[:-1]
        samples.append(([token for token, *_ in inputs], labels, [document for _, document, _ in inputs]))
    return samples


FORMATS: dict[str, tuple[Callable[[Path, Documents], Path], int, bool]] = {
    "megatron uint16": (lambda p, d: write_megatron(p, d), 65_499, False),
    "megatron int32": (lambda p, d: write_megatron(p, d, "i4"), 70_001, False),
    "megatron int64, several sequences": (lambda p, d: write_megatron(p, d, "i8"), 70_001, True),
    "fleet uint16": (lambda p, d: write_fleet(p, d), 65_499, False),
    "fleet int32, several sequences": (lambda p, d: write_fleet(p, d, "<i4"), 70_001, True),
    "fleet npz uint16": (lambda p, d: write_fleet_npz(p, d), 65_499, False),
    "fleet npz int32": (lambda p, d: write_fleet_npz(p, d, "<i4"), 70_001, False),
    "fleet npz packed": (lambda p, d: write_fleet_npz(p, d, "<i4", packed=True), 70_001, False),
}


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "no end token"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_sample_is_that_of_a_slow_reader(tmp_path: Path, name: str, ended: bool) -> None:
    write, largest, several = FORMATS[name]
    documents = corpus_of(largest, ended, several)
    eod = EOD if ended else None
    corpus = open_corpus(write(tmp_path / "data.v1", documents), eod=eod, vocab_size=largest + 1)
    assert (corpus.document_count, corpus.tokenizer) == (len(documents), None)
    for split in SPLITS:
        runs = document_runs(len(documents), "6,3,1", split)
        members = [member for first, end in runs for member in range(first, end)]
        length = 512 if sum(len(tokens) for m in members for tokens in documents[m]) > 60_000 else 3
        expected = slow_samples(documents, members, length, eod)
        samples = PackedSamples.open(corpus, split, "6,3,1", length)
        assert len(samples) == len(expected) > 4
        loader = Loader(samples, samples, BatchSlice(len(expected)), seed=1, separate_documents=True)
        (batch,) = loader.eval_batches()
        loader.close()
        assert batch.documents is not None
        found = zip(batch.tokens.tolist(), batch.labels.tolist(), batch.documents.tolist(), strict=True)
        assert list(found) == expected
        np.testing.assert_array_equal(samples.read(np.arange(len(samples)))[:-1, -1], batch.tokens[1:, 0])


def test_the_longest_document_is_in_one_of_the_splits(tmp_path: Path) -> None:
    corpus = open_corpus(write_fleet(tmp_path / "d", corpus_of(65_499, True)), vocab_size=65_500)
    assert max(fact.tokens for fact in split_facts(corpus, "6,3,1", 8)) > 65_535
    assert np.diff(corpus.documents).max() == 70_000


@pytest.mark.parametrize("dtype", MEGATRON_CODES)
def test_every_type_of_megatron_that_can_hold_tokens(tmp_path: Path, dtype: str) -> None:
    stored = read_stored(write_megatron(tmp_path / "d", [[[1, 2, 127]], [[5]]], dtype, modes=[0, 1]))
    assert stored.tokens.tolist() == [1, 2, 127, 5]
    assert stored.tokens.dtype.str.endswith(dtype)
    assert stored.modes is not None
    assert stored.modes.tolist() == [0, 1]


def test_files_that_numpy_itself_wrote(tmp_path: Path) -> None:
    """Its zip members have longer headers than those made by hand, and real files have them."""
    ids, lens = np.array([7, 8, 9, 3], dtype=np.uint16), np.array([3, 1], dtype=np.int32)
    np.savez(tmp_path / "a_ids.npz", ids=ids, lens=lens)
    np.savez_compressed(tmp_path / "b_ids.npz", ids=ids, lens=lens)
    np.save(tmp_path / "c_ids.npy", ids)
    np.savez(tmp_path / "c_idx.npz", lens=lens, docs=np.array([0, 1, 2]))
    for name in ("a", "b", "c"):
        stored = read_stored(tmp_path / name)
        assert stored.tokens.tolist() == [7, 8, 9, 3]
        assert stored.documents.tolist() == [0, 3, 4]
        assert bool(stored.notes) == (name == "b")


def test_what_is_stored_as_it_is_stays_in_its_file_and_cannot_be_changed(tmp_path: Path) -> None:
    documents = [[[4, 5, 6]]]
    for number, write in enumerate((write_megatron, write_fleet, write_fleet_npz)):
        tokens = read_stored(write(tmp_path / str(number) / "d", documents)).tokens
        assert isinstance(tokens, StoredArray)
        with pytest.raises(ValueError, match="read-only"):
            tokens[:][0] = 1


def test_the_folder_the_prefix_and_each_file_are_names_of_the_same(tmp_path: Path) -> None:
    for folder, write, endings in (
        ("megatron", write_megatron, (".bin", ".idx")),
        ("fleet", write_fleet, ("_ids.npy", "_idx.npz")),
        ("legacy", write_fleet_npz, ("_ids.npz",)),
    ):
        prefix = write(tmp_path / folder / "my.data", [[[5, 6]], [[7]]])
        for name in (prefix.parent, prefix, *(Path(f"{prefix}{ending}") for ending in endings)):
            assert holds_tokens(name)
            assert read_stored(name).tokens.tolist() == [5, 6, 7]
    write_megatron(tmp_path / "fleet" / "other", [[[1]]])
    with pytest.raises(UserError, match=r"fleet names several token files \(my.data_ids.npy, other.bin\); name one"):
        read_stored(tmp_path / "fleet")
    assert not holds_tokens(tmp_path / "nothing")


def word_tokenizer(path: Path, size: int, end: int | None = EOD) -> Path:
    words(size, None if end is None else "</s>", end or 0).save(str(path))
    return path


def test_vocabulary_and_end_of_document_come_from_the_tokenizer_or_the_settings(tmp_path: Path) -> None:
    ended, open_ = write_fleet(tmp_path / "e", [[[5, 3]], [[]], [[3]]]), write_fleet(tmp_path / "o", [[[5, 3]], [[6]]])
    tokenizer = word_tokenizer(tmp_path / "t.json", 10)
    corpus = open_corpus(ended, tokenizer=tokenizer)
    assert (corpus.vocab_size, corpus.eod) == (10, EOD)
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.id_to_token(5) == "w5"
    assert open_corpus(open_, tokenizer=tokenizer).eod is None
    assert open_corpus(open_, tokenizer=tokenizer, eod=6).eod == 6
    assert open_corpus(ended, tokenizer=word_tokenizer(tmp_path / "u.json", 10, None)).eod is None
    assert (open_corpus(ended, vocab_size=20).eod, open_corpus(ended, vocab_size=20).vocab_size) == (None, 20)
    with pytest.raises(UserError, match=r"without their tokenizer; set data.tokenizer to its tokenizer.json, or model"):
        open_corpus(ended)
    with pytest.raises(UserError, match=r"data.eod is 10 but the vocabulary has 10 tokens; use at most 9"):
        open_corpus(ended, eod=10, vocab_size=10)
    with pytest.raises(UserError, match=r"data.tokenizer .*none.json does not exist"):
        open_corpus(ended, tokenizer=tmp_path / "none.json")


def test_a_folder_of_ours_needs_no_settings_and_refuses_other_ones(tmp_path: Path, write_token_files) -> None:
    files = write_token_files([[1, 2], [4]], vocab_size=10)
    assert open_corpus(files.path, tokenizer=files.path / "tokenizer.json", eod=0).tokens.tolist() == [1, 2, 0, 4, 0]
    with pytest.raises(UserError, match=r"data.eod is 4 but .* was made with 0; use 0 or leave it out"):
        open_corpus(files.path, eod=4)
    with pytest.raises(UserError, match=r"data.tokenizer is .*t.json but .* made with the one in it"):
        open_corpus(files.path, tokenizer=word_tokenizer(tmp_path / "t.json", 10))


def test_a_token_outside_the_vocabulary_is_found(tmp_path: Path) -> None:
    corpus = open_corpus(write_megatron(tmp_path / "d", [[[5, 600, 7]]]), vocab_size=600)
    place = r"position 1 \(document 0, sample 0 of the train split\)"
    with pytest.raises(UserError, match=rf"d.bin holds token 600 at {place}, outside the vocabulary of 600"):
        PackedSamples.open(corpus, "train", "1", 2).read(np.array([0]))


def test_a_split_of_empty_documents_is_too_short(tmp_path: Path) -> None:
    corpus = open_corpus(write_fleet(tmp_path / "d", [[[]], [[5, 6, 7]], [[]], [[]]]), vocab_size=10)
    (empty,) = [fact.name for fact in split_facts(corpus, "1,1", 2) if fact.documents == 2 and fact.tokens == 0]
    with pytest.raises(UserError, match=f"the {empty} split .* holds 0 tokens"):
        PackedSamples.open(corpus, empty, "1,1", 2)
    (only,) = {"train", "valid"} - {empty}
    assert len(PackedSamples.open(corpus, only, "1,1", 2)) == 1


DOCUMENTS = [[[5, 6, 7]], [[]], [[8], [9, 3]]]
HEADER = 34  # bytes of an .idx before its lengths


def change(path: Path, offset: int, kind: str, value: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(f"<{kind}", content, offset, value)
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


MEGATRON_DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (lambda f: cut(f / "d.bin", 10), r"d.bin has 10 bytes but the lengths in d.idx add up to 6 tokens of uint16, 12"),
    (lambda f: cut(f / "d.idx", 20), r"d.idx is truncated: it has 20 bytes and the header alone 34"),
    (lambda f: cut(f / "d.idx", 60), r"d.idx has 60 bytes but with the 4 sequences and 4 document bounds .* have 114"),
    (lambda f: cut(f / "d.idx", 0), r"d.idx is not an index of Megatron-LM: it begins with b''"),
    (
        lambda f: (f / "d.idx").write_bytes(b"TNTIDX\0\0" * 20),
        r"d.idx is not an index of Megatron-LM: it begins with b'TNT",
    ),
    (lambda f: change(f / "d.idx", 9, "Q", 2), r"d.idx has version 2 of the format"),
    (lambda f: change(f / "d.idx", 17, "B", 9), r"d.idx has the unknown type code 9; those of tokens are 1 uint8, 2"),
    (
        lambda f: change(f / "d.idx", 17, "B", 7),
        r"d.idx says that its .bin holds float32 numbers, which are not tokens",
    ),
    (lambda f: change(f / "d.idx", 17, "B", 4), r"d.idx says that sequence 1 starts at byte 6 .* end at byte 12"),
    (lambda f: change(f / "d.idx", 18, "Q", 5), r"d.idx has 114 bytes but with the 5 sequences"),
    (lambda f: change(f / "d.idx", 26, "Q", 1 << 60), r"d.idx has 114 bytes but with the 4 sequences and 1,152,"),
    (lambda f: change(f / "d.idx", HEADER, "i", -3), r"d.idx gives sequence 0 the length -3"),
    (lambda f: change(f / "d.idx", HEADER + 12, "i", 40), r"d.bin has 12 bytes but the lengths .* add up to 44 tokens"),
    (
        lambda f: change(f / "d.idx", HEADER + 16 + 24, "q", 999),
        r"sequence 3 starts at byte 999 of the .bin, but .* 8;",
    ),
    (lambda f: change(f / "d.idx", HEADER + 48 + 8, "q", 4), r"document bounds from 0 to 4, but they must rise from 0"),
    (lambda f: change(f / "d.idx", HEADER + 48 + 24, "q", 3), r"document bounds from 0 to 3, .* its 4 sequences"),
    (lambda f: (f / "d.bin").unlink(), r"d.bin is missing, and the other file of the pair"),
    (lambda f: (f / "d.idx").unlink(), r"d.idx is missing, and the other file of the pair"),
]


@pytest.mark.parametrize("number", range(len(MEGATRON_DAMAGE)))
def test_damaged_megatron_files(tmp_path: Path, number: int) -> None:
    damage, message = MEGATRON_DAMAGE[number]
    prefix = write_megatron(tmp_path / "d", DOCUMENTS)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        read_stored(prefix)
    assert "\n" not in str(caught.value)


IDS, LENS, DOCS = fleet_parts(DOCUMENTS, "<u2")


def store(file: str, **members: bytes) -> Callable[[Path], None]:
    return lambda folder: npz(folder / file, **members)


FLEET_DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (lambda f: cut(f / "d_ids.npy", 136), r"d_ids.npy cannot be read: its header says 6 numbers of uint16 and it hol"),
    (lambda f: cut(f / "d_ids.npy", 40), r"d_ids.npy cannot be read"),
    (lambda f: cut(f / "d_ids.npy", 0), r"d_ids.npy cannot be read"),
    (lambda f: (f / "d_ids.npy").write_bytes(npy([5.0], "<f4")), r"d_ids.npy cannot be read: it holds float32 and not"),
    (lambda f: (f / "d_ids.npy").write_bytes(npy([5, 6], "<u2", "(1, 2)")), r"d_ids.npy .* shape \(1, 2\)"),
    (lambda f: (f / "d_ids.npy").write_bytes(npy([], "<u2")), r"d_ids.npy holds no tokens"),
    (lambda f: (f / "d_ids.npy").write_bytes(npy([5], "<u2")), r"d_idx.npz has \"lens\" that add up to 6 but d_ids"),
    (lambda f: (f / "d_ids.npy").unlink(), r"d_ids.npy is missing"),
    (lambda f: (f / "d_idx.npz").unlink(), r"d_idx.npz is missing"),
    (lambda f: cut(f / "d_idx.npz", 200), r"d_idx.npz cannot be read: File is not a zip file"),
    (store("d_idx.npz", docs=DOCS), r"d_idx.npz has no array \"lens\", so it is not a token file of Fleet"),
    (store("d_idx.npz", lens=LENS[:-4], docs=DOCS), r"d_idx.npz cannot be read: its header says 4 numbers of int32"),
    (store("d_idx.npz", lens=npy([9, -3, 0, 0], "<i4"), docs=DOCS), r"d_idx.npz has \"lens\" -3 for sequence 1"),
    (store("d_idx.npz", lens=LENS, docs=npy([0, 1, 2], "<i8")), r"\"docs\" that do not rise from 0 to the 4 seq"),
    (store("d_idx.npz", lens=LENS, docs=npy([0, 3, 2, 4], "<i8")), r"\"docs\" that do not rise from 0 to the 4 seq"),
    (store("d_idx.npz", lens=LENS, docs=npy([], "<i8")), r"\"docs\" that do not rise from 0 to the 4 sequences"),
]


@pytest.mark.parametrize("number", range(len(FLEET_DAMAGE)))
def test_damaged_fleet_files(tmp_path: Path, number: int) -> None:
    damage, message = FLEET_DAMAGE[number]
    prefix = write_fleet(tmp_path / "d", DOCUMENTS)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        read_stored(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_legacy_fleet_files(tmp_path: Path, packed: bool) -> None:
    path = Path(f"{write_fleet_npz(tmp_path / 'd', DOCUMENTS, packed=packed)}_ids.npz")
    whole = path.read_bytes()
    for size in (0, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"d_ids.npz cannot be read") as caught:
            read_stored(path)
        assert "\n" not in str(caught.value)
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    for members, message in (
        ({"lens": LENS}, 'has no array "ids"'),
        ({"ids": IDS}, 'has no array "lens"'),
        ({"ids": IDS[:-2], "lens": LENS}, "header says 6"),
        ({"ids": npy([5, 6], "<u2"), "lens": LENS}, "add up to 6"),
    ):
        npz(path, kind, **members)
        with pytest.raises(UserError, match=message):
            read_stored(path)


def test_the_fixtures_are_the_published_layout() -> None:
    """The shortest file there is, spelt out."""
    tokens, idx = megatron_files([[[258]]])
    assert tokens == b"\x02\x01"
    assert idx == b"MMIDIDX\0\0" + b"\1" + 7 * b"\0" + b"\x08" + b"\1" + 7 * b"\0" + b"\2" + 7 * b"\0" + (
        b"\1\0\0\0" + 8 * b"\0" + 8 * b"\0" + b"\1" + 7 * b"\0"
    )
