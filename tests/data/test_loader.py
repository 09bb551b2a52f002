"""Batches: a function of (seed, step) alone, whatever the number of ranks and whatever was read before."""

import dataclasses
import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch

from threefold.data.keyed_reading import fingerprint_of
from threefold.data.loader import Batch, BatchSlice, Loader
from threefold.data.order import ConsumedSamples
from threefold.data.packed import PackedSamples
from threefold.errors import UserError
from threefold.random import samples_at

LENGTH = 12
GLOBAL_BATCH = 12
SPLIT = "8,2"


@pytest.fixture
def make_loader(write_token_files, random_documents):
    """A function (dp_index, dp_size, seed) -> Loader over 200 documents; loaders are closed at the end."""
    files = write_token_files(random_documents(200))
    train = PackedSamples.open(files, "train", SPLIT, LENGTH)
    valid = PackedSamples.open(files, "valid", SPLIT, LENGTH)
    loaders = []

    def make(dp_index: int = 0, dp_size: int = 1, seed: int = 1, global_batch: int = GLOBAL_BATCH) -> Loader:
        loaders.append(Loader(train, valid, BatchSlice(global_batch, dp_index, dp_size), seed))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def together(batches: list[Batch]) -> Batch:
    return Batch(*(torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels", "rows")))


def assert_equal(one: Batch, other: Batch) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.labels, other.labels)
    assert torch.equal(one.rows, other.rows)


def test_a_batch_is_the_samples_that_the_order_names(make_loader) -> None:
    loader = make_loader(seed=5)
    for step in (0, 1, 2, 40):
        batch = loader.batch(step)
        counters = np.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        windows = loader.train.read(samples_at(counters, len(loader.train), seed=5))
        np.testing.assert_array_equal(batch.tokens.numpy(), windows[:, :-1])
        assert batch.tokens.dtype == batch.labels.dtype == batch.rows.dtype == torch.int64
        assert batch.rows.tolist() == list(range(GLOBAL_BATCH))


def test_labels_are_the_next_tokens_and_do_not_count_after_a_documents_end(make_loader) -> None:
    loader = make_loader()
    batch = loader.batch(0)
    windows = loader.train.read(samples_at(np.arange(GLOBAL_BATCH), len(loader.train), seed=1))
    ended = 0
    for tokens, labels, window in zip(batch.tokens.tolist(), batch.labels.tolist(), windows.tolist(), strict=True):
        for token, label, following in zip(tokens, labels, window[1:], strict=True):
            assert label == (-100 if token == loader.train.files.eod else following)
            ended += token == loader.train.files.eod
    assert ended > 0
    assert (batch.labels == loader.train.files.eod).any(), "the end itself is to be predicted"


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6])
def test_the_union_over_dp_is_the_global_batch(make_loader, dp_size: int) -> None:
    whole = make_loader()
    shares = [make_loader(index, dp_size) for index in range(dp_size)]
    for step in (0, 1, 2, 17):
        assert_equal(together([share.batch(step) for share in shares]), whole.batch(step))


def test_an_epoch_reads_every_sample_once(make_loader) -> None:
    loader = make_loader()
    n = len(loader.train)
    steps = -(-2 * n // GLOBAL_BATCH)
    rows = torch.cat([loader.batch(step).tokens for step in range(steps)])[: 2 * n].tolist()
    every_sample = sorted(loader.train.read(np.arange(n))[:, :-1].tolist())
    assert sorted(rows[:n]) == every_sample
    assert sorted(rows[n:]) == every_sample
    assert rows[:n] != rows[n:], "the second epoch has an order of its own"
    assert loader.epoch(0) == 0
    assert loader.epoch(n) == GLOBAL_BATCH


def test_epochs_are_counted_in_samples_whatever_the_batches_were(make_loader) -> None:
    loader = make_loader()
    loader.consumed = ConsumedSamples(GLOBAL_BATCH, 3, 100)
    assert loader.epoch(5) == (100 + 2 * GLOBAL_BATCH) / len(loader.train)


def test_documents_are_those_of_the_token_files(make_loader) -> None:
    """Every token has the number of its document, in both parts, across the gaps between the runs of a part."""
    loader = make_loader()
    assert loader.batch(0).documents is None
    told = Loader(loader.train, loader.heldout, loader.slice, 1, separate_documents=True)
    bounds, tokens = loader.train.files.documents, loader.train.files.tokens
    for batch in (told.batch(0), told.batch(3), *told.eval_batches(2)):
        assert batch.documents is not None
        for row, documents in zip(batch.tokens.numpy(), batch.documents.numpy(), strict=True):
            for number in set(documents.tolist()):
                text = tokens[bounds[number] : bounds[number + 1]].tolist()
                part = row[documents == number].tolist()
                assert any(text[at : at + len(part)] == part for at in range(len(text)))
            ends = np.flatnonzero(row[:-1] == loader.train.files.eod)
            assert np.array_equal(np.flatnonzero(np.diff(documents)), ends)
        assert fingerprint_of(batch) != fingerprint_of(dataclasses.replace(batch, documents=None))
    told.close()


def test_resuming_needs_the_step_alone_also_with_another_dp(make_loader) -> None:
    unbroken = [make_loader().batch(step) for step in range(8)]
    for step in range(4, 8):
        assert_equal(together([make_loader(index, 3).batch(step) for index in range(3)]), unbroken[step])


def test_steps_may_be_asked_for_in_any_order(make_loader) -> None:
    loader, other = make_loader(), make_loader()
    for step in (5, 6, 7, 3, 4, 4, 0, 1):
        assert_equal(loader.batch(step), other._read_train(step))


def test_a_batch_larger_than_the_epoch(write_token_files, random_documents) -> None:
    train = PackedSamples.open(write_token_files(random_documents(3)), "train", "1", 8)
    loader = Loader(train, None, BatchSlice(4 * len(train)), seed=0)
    rows = loader.batch(0).tokens.tolist()
    assert sorted(rows) == sorted(train.read(np.arange(len(train)))[:, :-1].tolist() * 4)
    loader.close()


class RecordedReads:
    """Samples that record each reading of a training batch: its step, and whether the caller's thread did it."""

    def __init__(self, samples: PackedSamples) -> None:
        self.samples, self.reads = samples, queue.Queue()

    def __len__(self) -> int:
        return len(self.samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.samples, name)

    def begun(self, consumed: ConsumedSamples) -> "RecordedReads":
        return self

    def ordered(self, counters: np.ndarray, seed: int) -> np.ndarray:
        self.reads.put((int(counters[0]) // GLOBAL_BATCH, threading.current_thread() is threading.main_thread()))
        return self.samples.ordered(counters, seed)


def test_the_next_step_is_read_once_and_while_the_caller_computes(make_loader) -> None:
    train = RecordedReads(make_loader().train)
    loader = Loader(train, None, BatchSlice(GLOBAL_BATCH), seed=1)
    loader.batch(0)
    assert train.reads.get(timeout=20) == (0, True)
    assert train.reads.get(timeout=20) == (1, False), "nobody has asked for it yet"
    loader.batch(1)
    assert train.reads.get(timeout=20) == (2, False)
    loader.close()
    assert train.reads.empty()


def test_damage_found_while_reading_ahead_reaches_the_caller(make_loader) -> None:
    whole = make_loader().train
    narrow = dataclasses.replace(whole.files, vocab_size=999)
    train = dataclasses.replace(whole, files=narrow)
    steps = range(-(-len(train) // GLOBAL_BATCH))
    loader = Loader(train, None, BatchSlice(GLOBAL_BATCH), seed=1)
    with pytest.raises(UserError, match=r"holds token 999 at position .* of the train split\), outside"):
        list(map(loader.batch, steps))  # token 999 is in one of the samples of an epoch
    loader.close()


@pytest.mark.parametrize(("global_batch", "dp_index", "dp_size"), [(12, 0, 5), (12, 3, 3), (12, -1, 3), (0, 0, 1)])
def test_impossible_shares_are_refused(global_batch: int, dp_index: int, dp_size: int) -> None:
    with pytest.raises(ValueError, match="has no slice"):
        BatchSlice(global_batch, dp_index, dp_size)


def losses_of(labels: torch.Tensor) -> torch.Tensor:
    """A stand-in for a model: some loss for every counted label."""
    return torch.where(labels == -100, 0.0, torch.sin(labels.double()) + 2)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6])
def test_evaluation_is_the_offline_average_and_equal_in_length(make_loader, dp_size: int) -> None:
    shares = [make_loader(index, dp_size) for index in range(dp_size)]
    samples = shares[0].heldout
    assert len(samples) % GLOBAL_BATCH, "the end must be ragged for this test"
    batches = [list(share.eval_batches()) for share in shares]
    assert {len(own) for own in batches} == {-(-len(samples) // GLOBAL_BATCH)}

    labels = torch.cat([batch.labels for own in batches for batch in own])
    windows = torch.from_numpy(samples.read(np.arange(len(samples))))
    offline = torch.where(windows[:, :-1] == samples.files.eod, -100, windows[:, 1:])
    expected = losses_of(offline).sum() / (offline != -100).sum()
    assert losses_of(labels).sum() / (labels != -100).sum() == pytest.approx(expected.item(), rel=1e-12)
    assert sorted(row for row in labels.tolist() if set(row) != {-100}) == sorted(offline.tolist())


def test_filled_up_rows_are_valid_tokens_that_do_not_count(make_loader) -> None:
    loader = make_loader()
    last = list(loader.eval_batches())[-1]
    real = len(loader.heldout) % GLOBAL_BATCH
    assert (last.labels[real:] == -100).all()
    assert (last.labels[:real] != -100).any(dim=1).all()
    assert last.tokens.shape == (GLOBAL_BATCH, LENGTH)
    assert last.tokens.max() < loader.heldout.files.vocab_size


def test_evaluation_is_the_same_every_time_and_leaves_training_alone(make_loader) -> None:
    loader, undisturbed = make_loader(), make_loader()
    loader.batch(0)
    first = list(loader.eval_batches(3))
    next(iter(loader.eval_batches(3)))  # one that is given up
    for one, other in zip(first, loader.eval_batches(3), strict=True):
        assert_equal(one, other)
    assert_equal(loader.batch(1), undisturbed.batch(1))


def test_how_many_evaluation_batches(make_loader) -> None:
    loader = make_loader()
    whole = loader.eval_batch_count()
    assert whole == loader.eval_batch_count(0) == loader.eval_batch_count(10_000) == len(list(loader.eval_batches(0)))
    assert loader.eval_batch_count(2) == len(list(loader.eval_batches(2))) == 2
    with pytest.raises(ValueError, match="without held-out samples"):
        Loader(loader.train, None, loader.slice, seed=0).eval_batch_count()


def test_fingerprints_tell_contents_apart(make_loader) -> None:
    loader = make_loader()
    batch = loader.batch(0)
    mark = fingerprint_of(batch)
    assert 0 <= mark < 2**63
    assert mark == fingerprint_of(make_loader().batch(0))
    for name in ("tokens", "labels", "rows"):
        changed = Batch(batch.tokens.clone(), batch.labels.clone(), batch.rows.clone())
        getattr(changed, name).view(-1)[-1] += 1
        assert fingerprint_of(changed) != mark
    assert fingerprint_of(Batch(batch.tokens.T, batch.labels, batch.rows)) != mark
    assert fingerprint_of(loader.batch(1)) != mark


def test_batches_are_pinned_where_a_gpu_copies_them(make_loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of the training and of the held-out batches, and with the same contents. (Pinning needs a GPU.)"""
    loader, plain = make_loader(), make_loader()
    expected, held_out = plain.batch(0), list(plain.eval_batches(2))
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    loader.pinned = True
    for batch, same in zip([loader.batch(0), *loader.eval_batches(2)], [expected, *held_out], strict=True):
        assert_equal(batch, same)
        tensors = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        assert all(tensor is None or tensor.data_ptr() in pinned for tensor in tensors)
