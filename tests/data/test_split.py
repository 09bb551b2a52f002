"""Documents are dealt to train, valid and test: all of them, once each, in proportion."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.data.samples import SPLITS, document_counts, document_runs, parse_split
from threefold.errors import UserError


def members(documents: int, split: str, name: str) -> list[int]:
    return [document for first, end in document_runs(documents, split, name) for document in range(first, end)]


@given(
    documents=st.integers(3, 2000),
    weights=st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000)),
)
def test_every_document_is_in_exactly_one_split(documents: int, weights: tuple[int, int, int]) -> None:
    split = ",".join(map(str, weights))
    counts = document_counts(documents, split)
    dealt = {name: members(documents, split, name) for name in SPLITS}
    assert sorted(itertools.chain(*dealt.values())) == list(range(documents))
    for name, weight in zip(SPLITS, weights, strict=True):
        assert len(dealt[name]) == counts[name]
        assert dealt[name] == sorted(dealt[name])
        assert (counts[name] == 0) == (weight == 0)
        assert abs(counts[name] - documents * weight / sum(weights)) < 3


def test_runs_are_as_long_as_they_can_be() -> None:
    for name in SPLITS:
        runs = document_runs(500, "8,1,1", name)
        assert np.all(runs[:, 1] > runs[:, 0])
        assert np.all(runs[1:, 0] > runs[:-1, 1])


def test_the_usual_split_of_a_thousand_documents() -> None:
    assert document_counts(1000, "949,50,1") == {"train": 949, "valid": 50, "test": 1}


def test_held_out_documents_come_from_everywhere() -> None:
    valid = np.array(members(10_000, "949,50,1", "valid"))
    assert np.bincount(valid * 10 // 10_000, minlength=10).min() > 25


def test_the_documents_of_a_split_are_the_same_in_every_version() -> None:
    """Otherwise a resumed run would train on documents that it was validated on."""
    assert members(200, "949,50,1", "valid") == [5, 57, 70, 76, 112, 119, 151, 152, 154, 166]
    assert members(200, "949,50,1", "test") == [88]


@pytest.mark.parametrize(
    ("text", "weights"),
    [("949,50,1", (949, 50, 1)), (" 9, 1 ", (9, 1, 0)), ("1", (1, 0, 0)), ("0.9,0.1,0", (0.9, 0.1, 0))],
)
def test_weights_are_read(text: str, weights: tuple[float, float, float]) -> None:
    assert parse_split(text) == weights


@pytest.mark.parametrize("text", ["", "a,b,c", "1,2,3,4", "0,1,1", "1,-1,0", "inf,1,1", "nan,1,1", "1,,1"])
def test_malformed_weights_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"data\.split is"):
        parse_split(text)


def test_too_few_documents_for_the_splits() -> None:
    with pytest.raises(
        UserError, match=r'needs at least 3 documents and the data holds 2; .* data.split to "949,50,0"'
    ):
        document_counts(2, "949,50,1")
    assert document_counts(3, "949,50,1") == {"train": 1, "valid": 1, "test": 1}
