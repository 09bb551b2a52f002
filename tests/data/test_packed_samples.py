"""Samples of a split against a slow oracle: the documents of the split, concatenated."""

import dataclasses

import numpy as np
import pytest

from threefold.data.packed import PackedSamples
from threefold.data.samples import SPLITS, document_runs, token_runs
from threefold.errors import UserError
from threefold.report.tokens import split_facts

from .conftest import EOD


def oracle(documents: list[list[int]], split: str, name: str, length: int) -> np.ndarray:
    stream: list[int] = []
    for first, end in document_runs(len(documents), split, name):
        for document in documents[first:end]:
            stream += [*document, EOD]
    count = (len(stream) - 1) // length
    return np.array([stream[i * length : i * length + length + 1] for i in range(count)])


@pytest.mark.parametrize("split", ["949,50,1", "1,0,0", "1,1,1", "5,3"])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 150])
def test_samples_are_windows_of_the_concatenated_documents(write_token_files, random_documents, split, length) -> None:
    documents = random_documents(300)
    files = write_token_files(documents)
    for name in SPLITS:
        expected = oracle(documents, split, name, length)
        if not len(expected):
            with pytest.raises(UserError):
                PackedSamples.open(files, name, split, length)
            continue
        samples = PackedSamples.open(files, name, split, length)
        assert len(samples) == len(expected)
        np.testing.assert_array_equal(samples.read(np.arange(len(samples))), expected)
        some = np.array([len(expected) - 1, 0, len(expected) // 2])
        np.testing.assert_array_equal(samples.read(some), expected[some])


def test_a_document_longer_than_16_bits_can_count(write_token_files) -> None:
    documents = [[1 + i % 999 for i in range(70_000)], [5], [1 + i * 7 % 999 for i in range(140_000)]]
    files = write_token_files(documents)
    samples = PackedSamples.open(files, "train", "1,0,0", 1024)
    np.testing.assert_array_equal(samples.read(np.arange(len(samples))), oracle(documents, "1,0,0", "train", 1024))


def test_the_next_sample_overlaps_by_one(write_token_files, random_documents) -> None:
    windows = PackedSamples.open(write_token_files(random_documents(50)), "train", "1", 10).read(np.arange(20))
    np.testing.assert_array_equal(windows[:-1, -1], windows[1:, 0])


def test_a_sequence_too_long_names_the_longest_that_works(write_token_files) -> None:
    files = write_token_files([[1, 2, 3, 4], [5], [6, 7, 8]])  # 5 + 2 + 4 tokens
    with pytest.raises(UserError, match=r"sequence_length is 11 .* holds 11 tokens; .* that works is 10"):
        PackedSamples.open(files, "train", "1,0,0", 11)
    assert len(PackedSamples.open(files, "train", "1,0,0", 10)) == 1
    with pytest.raises(UserError, match="must be at least 1"):
        PackedSamples.open(files, "train", "1,0,0", 0)


def test_a_split_without_documents_or_with_one_token(write_token_files) -> None:
    files = write_token_files([[1, 2], [], [3]])
    with pytest.raises(UserError, match=r'"1,0,0" gives the valid split no documents; give it a weight'):
        PackedSamples.open(files, "valid", "1,0,0", 1)
    shortest = min(SPLITS, key=lambda name: next(f.tokens for f in split_facts(files, "1,1,1", 1) if f.name == name))
    with pytest.raises(UserError, match=f"the {shortest} split .* holds 1 tokens; .* larger weight"):
        PackedSamples.open(files, shortest, "1,1,1", 1)


@pytest.mark.parametrize("split", ["8,2", "949,50,1", "1,1,1", "3,0,1"])
@pytest.mark.parametrize("count", [2, 97, 2000])
def test_one_document_is_cut(write_token_files, split: str, count: int) -> None:
    """Train, valid and test in this order, each token in one of them, and no sample with tokens of two."""
    files = write_token_files([list(range(1, count + 1))], vocab_size=count + 1)
    shares = [float(weight) for weight in split.split(",")]
    begun = 0
    for name, share in zip(SPLITS, shares, strict=False):
        ((first, end),) = token_runs(files.documents, split, name).tolist() or [(begun, begun)]
        assert first == begun
        assert abs(end - first - share / sum(shares) * (count + 1)) <= 1
        begun = end
        if end - first < 8:
            continue
        samples = PackedSamples.open(files, name, split, 7)
        read = samples.read(np.arange(len(samples)))
        places = np.where(read == EOD, count, read - 1)
        assert places[0, 0] == first
        assert ((places >= first) & (places < end)).all()
        facts = next(each for each in split_facts(files, split, 7) if each.name == name)
        assert (facts.documents, facts.tokens, facts.samples) == (1, end - first, len(samples))
    assert begun == count + 1


def test_a_token_outside_the_vocabulary_is_found(write_token_files) -> None:
    files = write_token_files([[1, 999, 3]], vocab_size=1000)
    narrow = dataclasses.replace(files, vocab_size=999)
    place = r"position 1 \(document 0, sample 0 of the train split\)"
    with pytest.raises(UserError, match=rf"tokens.bin holds token 999 at {place}, outside"):
        PackedSamples.open(narrow, "train", "1", 3).read(np.array([0]))


def test_facts_of_the_splits_add_up(write_token_files, random_documents) -> None:
    files = write_token_files(random_documents(100))
    facts = split_facts(files, "8,2,0", 16)
    assert [fact.name for fact in facts] == ["train", "valid", "test"]
    assert sum(fact.documents for fact in facts) == 100
    assert sum(fact.tokens for fact in facts) == files.meta.tokens
    for fact in facts[:2]:
        assert fact.samples == len(PackedSamples.open(files, fact.name, "8,2,0", 16))
    assert (facts[2].documents, facts[2].tokens, facts[2].samples) == (0, 0, 0)
