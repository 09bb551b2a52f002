"""Mixtures against slow oracles: which corpus each sample comes from, which of its samples, and resuming anywhere."""

from fractions import Fraction
from itertools import pairwise
from math import floor
from pathlib import Path

import numpy as np
import pytest
import torch

from threefold.config import load_config
from threefold.data.corpus import Corpus
from threefold.data.dataset import open_dataset
from threefold.data.loader import Batch, BatchSlice, Loader
from threefold.data.order import LONGEST_PERIOD, Blend, ConsumedSamples, whole_weights
from threefold.data.packed import PackedSamples
from threefold.data.samples import MixedSamples, MixturePart, Samples
from threefold.errors import UserError
from threefold.random import KeyedPermutation

from .conftest import EOD

LENGTH = 8
GLOBAL_BATCH = 12
WEIGHTS = (0.55, 0.35, 0.1)
SPLIT = "8,2"
MIXTURES = [
    (1.0,),
    (1, 1),
    (0.7, 0.2, 0.1),
    (5, 3),
    WEIGHTS,
    (1, 1, 1, 1, 1),
    (0.9, 0.04, 0.03, 0.02, 0.01),
    (97, 2, 1),
]


def exact(weights: tuple[float, ...]) -> list[Fraction]:
    fractions = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(fractions) for weight in fractions]


def choices_oracle(weights: tuple[float, ...], samples: int) -> list[int]:
    """Tijdeman's rule as it is stated: of those that are behind enough, the one that must come soonest."""
    shares, counts, chosen = exact(weights), [0] * len(weights), []
    slack = Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else Fraction(0)
    for n in range(1, samples + 1):
        behind = [i for i, share in enumerate(shares) if share * n - counts[i] >= slack]
        best = min(behind, key=lambda i: (floor((counts[i] + 1 - slack) / shares[i]), i))
        chosen.append(best)
        counts[best] += 1
    return chosen


@pytest.mark.parametrize("weights", MIXTURES)
def test_the_corpus_of_each_sample_follows_the_rule(weights: tuple[float, ...]) -> None:
    corpora, own = Blend(weights)(np.arange(500))
    assert corpora.tolist() == choices_oracle(weights, 500)
    seen = [0] * len(weights)
    for corpus, counter in zip(corpora.tolist(), own.tolist(), strict=True):
        assert counter == seen[corpus], "each corpus is read in its own order, nothing twice and nothing left out"
        seen[corpus] += 1


@pytest.mark.parametrize(
    "weights", [*MIXTURES, (0.123, 0.877), (1, 999), (3, 14, 15, 92, 65, 35), (0.333, 0.333, 0.334)]
)
def test_every_count_is_within_one_of_its_weight_at_all_times(weights: tuple[float, ...]) -> None:
    blend, samples = Blend(weights), 6_000
    corpora, _ = blend(np.arange(samples))
    counts = np.cumsum(corpora[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.arange(1, samples + 1)[:, None] * np.array([float(share) for share in exact(weights)])
    bound = 1 - 1 / max(1, 2 * len(weights) - 2)
    assert np.abs(counts - ideal).max() <= bound + 1e-9
    for n in (0, 1, 17, samples):
        assert blend.counts(n).tolist() == np.bincount(corpora[:n], minlength=len(weights)).tolist()
    for n in (10**9 + 7, 10**15 + 11):
        assert all(abs(c - n * w) < 1 for c, w in zip(blend.counts(n).tolist(), exact(weights), strict=True))


def test_weights_of_many_digits_are_rounded_and_tiny_ones_refused() -> None:
    weights = (123_456_789, 987_654_321, 555_555_557)
    assert sum(whole_weights(weights)) == LONGEST_PERIOD
    blend, n = Blend(weights), 100_000
    for count, weight in zip(blend.counts(n).tolist(), weights, strict=True):
        assert abs(count - n * weight / sum(weights)) < 2
    with pytest.raises(UserError, match=r"weight of 1e-06, .* one sample in 65,536; use 1.5e-05 at least"):
        Blend((1, 1e-6))


@pytest.fixture
def corpora(write_token_files, random_documents) -> list[Corpus]:
    """Three corpora of very different sizes."""
    return [write_token_files(random_documents(count, seed=seed)) for seed, count in enumerate((60, 25, 9))]


def mixed(corpora: list[Corpus], part: str = "train") -> MixedSamples:
    return MixedSamples(
        [
            MixturePart(str(corpus.path), PackedSamples.open(corpus, part, SPLIT, LENGTH), weight)
            for corpus, weight in zip(corpora, WEIGHTS, strict=True)
        ]
    )


def run_oracle(corpora: list[Corpus], seed: int, samples: int) -> list[list[int]]:
    """Windows of a run's samples, one after the other, from the samples of each corpus alone."""
    parts = [PackedSamples.open(corpus, "train", SPLIT, LENGTH) for corpus in corpora]
    windows, counts = [], [0] * len(parts)
    for corpus in choices_oracle(WEIGHTS, samples):
        size = len(parts[corpus])
        epoch, place = divmod(counts[corpus], size)
        sample = KeyedPermutation(size, seed, epoch)(np.array([place]))
        windows.append(parts[corpus].read(sample)[0].tolist())
        counts[corpus] += 1
    return windows


@pytest.fixture
def make_loader(corpora: list[Corpus]):
    """A function (dp_index, dp_size, seed) -> Loader; loaders are closed at the end."""
    train, heldout, loaders = mixed(corpora), mixed(corpora, "valid"), []

    def make(dp_index: int = 0, dp_size: int = 1, seed: int = 1) -> Loader:
        loaders.append(
            Loader(train, heldout, BatchSlice(GLOBAL_BATCH, dp_index, dp_size), seed, separate_documents=True)
        )
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def assert_is(batch: Batch, windows: list[list[int]]) -> None:
    assert batch.tokens.tolist() == [window[:-1] for window in windows]
    expected = [[-100 if token == EOD else after for token, after in pairwise(window)] for window in windows]
    assert batch.labels.tolist() == expected


def test_a_run_reads_what_the_oracle_names(make_loader, corpora: list[Corpus]) -> None:
    steps = 30  # several epochs of the smallest corpus
    windows = run_oracle(corpora, 5, steps * GLOBAL_BATCH)
    loader = make_loader(seed=5)
    for step in range(steps):
        assert_is(loader.batch(step), windows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
    assert max(loader.corpus_epochs(steps).values()) > 2


def test_epochs_are_counted_in_samples_whatever_the_batches_were(make_loader) -> None:
    loader = make_loader()
    loader.consumed = ConsumedSamples(GLOBAL_BATCH, 3, 100)
    assert loader.corpus_epochs(5) == loader.train.epochs(100 + 2 * GLOBAL_BATCH)


def test_one_corpus_is_what_it_is_alone(corpora: list[Corpus]) -> None:
    alone = PackedSamples.open(corpora[0], "train", SPLIT, LENGTH)
    only = MixedSamples([MixturePart("only", alone, 3.0)])
    counters = np.arange(500, 900)
    np.testing.assert_array_equal(only.ordered(counters, 7), alone.ordered(counters, 7))


class Keyed(Samples):
    """Samples whose inputs are their indices, and whose labels are the keys that they are read under."""

    def __len__(self) -> int:
        return 5

    def labelled(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        assert keys is not None
        return indices[:, None], keys[:, None]


def test_each_sample_is_read_under_its_own_key() -> None:
    """Corpora may be read for different times, so keys differ within a batch."""
    both = MixedSamples([MixturePart("first", Keyed(), 1.0), MixturePart("second", Keyed(), 2.0)])
    indices, keys = np.array([7, 1, 9, 0, 5, 4]), np.array([10, 11, 12, 13, 14, 15])
    inputs, labels = both.labelled(indices, keys)
    assert inputs[:, 0].tolist() == [2, 1, 4, 0, 0, 4]
    assert labels[:, 0].tolist() == keys.tolist()


def test_documents_are_told_apart_in_every_corpus(make_loader, corpora: list[Corpus]) -> None:
    batch = make_loader().batch(0)
    assert batch.documents is not None
    for row, documents in zip(batch.tokens.numpy(), batch.documents.numpy(), strict=True):
        np.testing.assert_array_equal(np.flatnonzero(np.diff(documents)), np.flatnonzero(row[:-1] == EOD))


def test_evaluation_batches_are_shared_by_weight(make_loader) -> None:
    loader = make_loader()
    held = [-(-len(part.samples) // GLOBAL_BATCH) for part in loader.heldout.parts]
    assert [count for _, count in loader.eval_parts(None)] == held
    assert [count for _, count in loader.eval_parts(2)] == [1, 1, 1]
    assert [part.weight for part, _ in loader.eval_parts(2)] == pytest.approx(WEIGHTS)
    for part, count in loader.eval_parts(None):
        rows = torch.cat([batch.labels for batch in loader.eval_batches(count, part.samples)])
        real = [row for row in rows.tolist() if set(row) != {-100}]
        assert len(real) == len(part.samples)
    assert loader.is_mixture


def config_of(folder: Path, text: str, *overrides: str):
    path = folder / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_a_config_names_a_mixture(tmp_path: Path, corpora: list[Corpus]) -> None:
    one, other, _ = (corpus.path for corpus in corpora)
    config = config_of(
        tmp_path, f"data: {{sequence_length: {LENGTH}, split: '8,2', mixture: {{{one}: 3, {other}: 1}}}}"
    )
    dataset = open_dataset(config)
    assert [(source.name, source.weight) for source in dataset.sources] == [(str(one), 3.0), (str(other), 1.0)]
    samples = dataset.samples("train")
    assert samples.epochs(400) == {
        str(path): count / len(PackedSamples.open(corpus, "train", SPLIT, LENGTH))
        for path, corpus, count in ((one, corpora[0], 300), (other, corpora[1], 100))
    }
    assert load_config(write(tmp_path / "again.yaml", config.to_yaml())) == config
    changed = config_of(tmp_path, "data: {path: x}", "data.path=null", f"data.mixture={{{one}: 0.5}}")
    assert changed.data.corpora == {str(one): 0.5}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_corpora_of_other_tokenizers_are_not_mixed(tmp_path: Path, write_token_files) -> None:
    one, other = write_token_files([[1, 2]]), write_token_files([[1, 2]], vocab_size=70_000)
    config = config_of(tmp_path, f"data: {{mixture: {{{one.path}: 1, {other.path}: 1}}}}")
    with pytest.raises(UserError, match=rf"names {one.path} and {other.path}, which were made with different tokeniz"):
        open_dataset(config)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data: {mixture: {a: 0}}", "line 1: data.mixture is {'a': 0} but must be paths and their weights, each above"),
        ("data: {mixture: {a: b}}", "data.mixture is {'a': 'b'} but must be paths and their weights"),
        ("data: {mixture: {1.5: 2}}", "data.mixture is {1.5: 2} but must be paths and their weights"),
        ("data: {mixture: a}", "data.mixture is 'a' but must be paths and their weights"),
        ("data: {mixture: {}}", "data.mixture is {} but must be paths and their weights"),
        ("data:\n  path: x\n  mixture: {a: 1}", "line 3: data.mixture is {'a': 1} but data.path is 'x' too; leave one"),
        ("data: {split: '1'}", "data.path is missing; name the folder"),
    ],
)  # fmt: skip
def test_a_mixture_that_is_none_ends_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of(tmp_path, text)
    assert sentence in str(caught.value)
