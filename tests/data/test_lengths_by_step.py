"""Samples whose length changes by step are cut from one stream: in an epoch, each token is a label once."""

from typing import Any

import numpy as np
import pytest

from threefold.config.by_step import NumberByStep, parts_by_step, value_at
from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.data.loader import BatchSlice, Loader
from threefold.data.packed import PackedSamples
from threefold.data.samples import MixedSamples, MixturePart
from threefold.errors import UserError

LENGTHS = NumberByStep({0: 4, 3: 16, 5: 8})
SIZES = NumberByStep({0: 4, 4: 2})


@pytest.fixture
def train(write_token_files, random_documents) -> PackedSamples:
    return PackedSamples.open(write_token_files(random_documents(60, seed=3)), "train", "1", 16)


def loader_of(train: PackedSamples, dp_index: int = 0, dp: int = 1) -> Loader:
    return Loader(train, train, BatchSlice(SIZES, dp_index, dp), seed=7, length=LENGTHS)


def places(train: PackedSamples, loader: Loader, step: int) -> list[int]:
    """Return the place in the stream of each input token of a batch."""
    length = value_at(LENGTHS, step)
    return (loader.sample_indices(step)[:, None] * length + np.arange(length)).ravel().tolist()


def test_each_token_of_an_epoch_is_read_once(train: PackedSamples) -> None:
    loader, read, step = loader_of(train), list[int](), 0
    while len(read) < 2 * 16 * len(train):
        read += places(train, loader, step)
        step += 1
    for epoch in range(2):
        of_epoch = read[epoch * 16 * len(train) : (epoch + 1) * 16 * len(train)]
        assert sorted(of_epoch) == list(range(16 * len(train)))
        assert of_epoch != sorted(of_epoch)
    assert loader.epoch(step) == pytest.approx(len(read) / (16 * len(train)))
    loader.close()


def test_batches_have_the_length_of_their_step_and_the_tokens_of_the_stream(train: PackedSamples) -> None:
    loader, stream = loader_of(train), train.files.tokens
    for step in range(8):
        batch, at = loader.batch(step), np.array(places(train, loader, step))
        assert batch.tokens.shape == (value_at(SIZES, step), value_at(LENGTHS, step))
        assert batch.tokens.ravel().tolist() == stream[train.runs(at)].tolist()
        counted = batch.labels.ravel() != -100
        assert batch.labels.ravel()[counted].tolist() == stream[train.runs(at[counted.numpy()] + 1)].tolist()
        parts = [loader_of(train, index, 2) for index in range(2)]
        assert [row for part in parts for row in part.batch(step).tokens.tolist()] == batch.tokens.tolist()
        for part in parts:
            part.close()
    assert {batch.tokens.shape[1] for batch in loader.eval_batches(2)} == {16}
    loader.close()


def test_parts_are_of_the_shortest_common_length() -> None:
    assert parts_by_step(SIZES, LENGTHS) == (NumberByStep({0: 4, 3: 16, 4: 8, 5: 4}), 4)
    assert parts_by_step(8, 128) == (8, 1)


def test_a_mixture_is_not_cut(train: PackedSamples) -> None:
    with pytest.raises(UserError, match="only tokens of texts are cut"):
        MixedSamples([MixturePart("a", train, 1.0), MixturePart("b", train, 1.0)]).cut(2)


@pytest.mark.parametrize(
    ("lengths", "more", "expected"),
    [
        (
            {0: 16, 3: 48, 5: 32},
            {},
            "its entry 5: 32 must divide the largest, 48; use 24",
        ),
        ({0: 16, 1: 64}, {"batch": 3}, "its entry 1: 64 begins after 48 tokens, .* a multiple of it; use entry 4"),
        ({0: 16, 1: 64}, {"parallel": {"cp": 16}}, "use data.sequence_length 32 instead of 16"),
        ({0: 16, 1: 64}, {"mixture": {"a": 1, "b": 1}}, "data.mixture assigns samples of one length .*; use 64"),
        ({0: 16, 1: 64}, {"exact": True}, "data.sequence_length is .* train.exact is true, .*; use 64"),
    ],
    ids=str,
)
def test_each_entry_is_checked(lengths: Any, more: dict[str, Any], expected: str) -> None:
    data = {"mixture": more["mixture"]} if "mixture" in more else {"path": "x"}
    sections = {
        "data": {"sequence_length": lengths, **data},
        "train": {"global_batch_size": more.get("batch", 4), "exact": more.get("exact", False)},
        "parallel": more.get("parallel", {}),
    }
    with pytest.raises(UserError, match=rf"{expected}\.$"):
        resolve(config_of(sections), 301)
