"""Samples: the train, validation and test splits of a corpus's documents, and mixtures of corpora.

Documents are assigned to the splits by a keyed permutation of their numbers, so a held-out split represents the
whole corpus. The key is fixed, whatever the run's seed, so that runs can be compared on it. A corpus of one document,
such as a book, is cut into splits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from threefold.data.order import Blend, ConsumedSamples, Standing
from threefold.errors import UserError
from threefold.random import Float64Array, Int64Array, KeyedPermutation, samples_at

SPLITS: Final = ("train", "valid", "test")
HELD_OUT: Final = "validation"
"""Split of validation data of a run's own (`data.validation`): all documents are in its part "valid"."""


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse weights of train, valid and test such as "949,50,1"; missing ones are 0. Raises UserError if malformed."""
    if text == HELD_OUT:
        return 0.0, 1.0, 0.0
    try:
        weights = [float(field) for field in text.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= w < math.inf for w in weights) or weights[0] == 0:
        raise UserError(
            f'data.split is "{text}" but must be weights of train, valid and test, none negative and train above 0, '
            'such as "949,50,1"'
        )
    train, valid, test = (*weights, 0.0, 0.0)[:3]
    return train, valid, test


def document_counts(documents: int, split: str) -> dict[str, int]:
    """Divide `documents` among the splits by largest remainder; each split with a weight above 0 gets at least 1."""
    weights = np.array(parse_split(split))
    wanted = int(np.count_nonzero(weights))
    if documents < wanted:
        nearest = ",".join(f"{w:g}" if i < documents else "0" for i, w in enumerate(weights))
        unevaluated = " and train.eval_every to 0" if documents < 2 and weights[1] else ""
        raise UserError(
            f'data.split "{split}" needs at least {wanted} documents and the data holds {documents}; '
            f'prepare more documents, or set data.split to "{nearest}"{unevaluated}'
        )
    exact = weights / weights.sum() * documents
    counts = np.floor(exact).astype(np.int64)
    remainders = np.argsort(counts - exact, kind="stable")
    counts[remainders[: documents - counts.sum()]] += 1
    for empty in np.flatnonzero((counts == 0) & (weights > 0)):
        counts[np.argmax(counts)] -= 1
        counts[empty] = 1
    return dict(zip(SPLITS, counts.tolist(), strict=True))


def document_runs(documents: int, split: str, name: str) -> Int64Array:
    """Return the documents of split `name`, in file order, as runs of numbers: first and end, int64 [runs, 2]."""
    counts = document_counts(documents, split)
    largest = max(counts, key=lambda key: counts[key])
    if name != largest:
        members = _assigned(documents, counts, name)
        firsts, lasts = np.diff(members, prepend=-2) != 1, np.diff(members, append=-2) != 1
        return np.stack([members[firsts], members[lasts] + 1], axis=1)
    # The largest split is the complement of the others, so its millions of documents need no permutation.
    others = np.concatenate([_assigned(documents, counts, other) for other in SPLITS if other != largest])
    others.sort()
    firsts, ends = np.append(0, others + 1), np.append(others, documents)
    return np.stack([firsts, ends], axis=1)[firsts < ends]


def token_runs(documents: Int64Array, split: str, name: str) -> Int64Array:
    """Return the tokens of split `name` as runs of positions, first and end: int64 [runs, 2].

    `documents` are the positions at which documents begin, and the end of the last. A corpus of one document is cut:
    its first tokens are for training, the next for validation, and the last for the test.
    """
    weights = np.array(parse_split(split))
    if len(documents) != 2 or np.count_nonzero(weights) == 1:
        return np.asarray(documents[document_runs(len(documents) - 1, split, name)])
    shares = np.append(0.0, np.cumsum(weights))
    start, end = int(documents[0]), int(documents[1])
    bounds = start + np.rint(shares / shares[-1] * (end - start)).astype(np.int64)
    place = SPLITS.index(name)
    run = bounds[None, place : place + 2]
    return run[run[:, 0] < run[:, 1]]


def document_numbers(documents: int, split: str, name: str) -> Int64Array:
    """Return the documents of split `name`, in file order: int64 [documents of the split]."""
    runs = document_runs(documents, split, name)
    return np.concatenate([np.arange(0), *(np.arange(first, end) for first, end in runs)])


def _assigned(documents: int, counts: dict[str, int], name: str) -> Int64Array:
    before = sum(counts[other] for other in SPLITS[: SPLITS.index(name)])
    places = np.arange(before, before + counts[name], dtype=np.int64)
    return np.sort(KeyedPermutation(documents, seed=0, purpose="split")(places))


class Samples:
    """Samples of equal length S, the same on every rank; those of one corpus define only the first methods."""

    def __len__(self) -> int:
        raise NotImplementedError

    def labelled(self, indices: Int64Array, keys: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        """Return inputs and labels of samples, int64 [rows, S] each; ignored labels are -100.

        `keys` decide what a user's samples draw at random, by row; None if they draw nothing.
        """
        raise NotImplementedError

    @property
    def draws(self) -> bool | None:
        """Whether samples that were read under keys have drawn random numbers; None if no code of the user reads."""
        return None

    def documents(self, indices: Int64Array) -> Int64Array:
        """Return the document of each input token, for the attention mask: int64 [rows, S], non-decreasing in a row."""
        raise NotImplementedError

    def cut(self, ratio: int) -> "Samples":
        """Return each sample cut into `ratio` equal ones, i into i · `ratio` and on; each token is a label once."""
        raise UserError(
            "data.sequence_length changes by step, and only tokens of texts are cut into samples of several lengths; "
            "give one length, or prepare the data with `threefold data prepare`."
        )

    def padding(self, indices: Int64Array) -> Int64Array:
        """Return the number of padding tokens of each sample: int64 [rows]."""
        return np.zeros(len(indices), np.int64)

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        """Return the n-th sample of a run for each n in `counters`: the sampler, a function of (seed, n) alone."""
        return samples_at(counters, len(self), seed)

    def passes(self, counters: Int64Array) -> Int64Array:
        """Return how often its data set had been read whole before each n-th sample of a run."""
        return counters // len(self)

    def positions(self, indices: Int64Array) -> Int64Array | None:
        """Return the position of each input token, int64 [rows, S], if positions restart with each document."""
        return None

    def references(self, indices: Int64Array) -> Float64Array | None:
        """Return the reference log-probabilities of pairs, chosen and rejected, [rows, 2]; None if there are none."""
        return None

    def standing(self, counter: int) -> Standing:
        """Return where each corpus of a mixture stands after `counter` samples; empty for a single corpus."""
        return ()

    def begun(self, consumed: ConsumedSamples) -> "Samples":
        """Return the samples as a run reads them that starts or resumes with these samples consumed."""
        return self

    @property
    def parts(self) -> "tuple[MixturePart, ...]":
        """Corpora that the samples come from, with weights that sum to 1."""
        return (MixturePart("", self, 1.0),)

    def epochs(self, counter: int) -> dict[str, float]:
        """Return the passes over each part of a mixture after `counter` samples, by name; empty for a single corpus."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a user should know about how the samples were made."""
        return ()


@dataclass(frozen=True)
class MixturePart:
    """One corpus of a mixture: its name, its samples, and its fraction of the samples that a run reads."""

    name: str
    samples: Samples
    weight: float


class MixedSamples(Samples):
    """Samples of several corpora, one corpus after the other, which a run reads in the order of a `Blend`."""

    def __init__(self, parts: Sequence[MixturePart], consumed: ConsumedSamples | None = None) -> None:
        self._given, self._consumed = parts, consumed or ConsumedSamples(1)
        total = sum(part.weight for part in parts)
        self._parts = tuple(MixturePart(part.name, part.samples, part.weight / total) for part in parts)
        self._starts = np.cumsum([0, *(len(part.samples) for part in parts[:-1])]).tolist()

    @cached_property
    def blend(self) -> Blend:
        """Corpus of each sample of the run."""
        return Blend([part.weight for part in self._given], self._consumed)

    def standing(self, counter: int) -> Standing:
        return self.blend.standing(counter)

    def begun(self, consumed: ConsumedSamples) -> "MixedSamples":
        return MixedSamples(self._given, consumed)

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        return self._parts

    def __len__(self) -> int:
        return sum(len(part.samples) for part in self.parts)

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        corpora, counters_there = self.blend(counters)
        indices = np.empty_like(counters)
        for corpus, (part, start) in enumerate(zip(self.parts, self._starts, strict=True)):
            here = corpora == corpus
            indices[here] = start + part.samples.ordered(counters_there[here], seed)
        return indices

    def passes(self, counters: Int64Array) -> Int64Array:
        corpora, counters_there = self.blend(counters)
        return counters_there // np.array([len(part.samples) for part in self.parts])[corpora]

    def labelled(self, indices: Int64Array, keys: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        def read(samples: Samples, there: Int64Array, rows: Int64Array) -> Int64Array:
            return np.stack(samples.labelled(there, None if keys is None else keys[rows]), 1)

        both = self._gathered(indices, read)
        return both[:, 0], both[:, 1]

    @property
    def draws(self) -> bool | None:
        known = [draws for part in self.parts if (draws := part.samples.draws) is not None]
        return any(known) if known else None

    def documents(self, indices: Int64Array) -> Int64Array:
        return self._gathered(indices, lambda samples, there, _: samples.documents(there))

    def epochs(self, counter: int) -> dict[str, float]:
        counts = self.blend.counts(counter).tolist()
        return {part.name: count / len(part.samples) for part, count in zip(self.parts, counts, strict=True)}

    def positions(self, indices: Int64Array) -> Int64Array | None:
        divided, back = self._divided(indices)
        parts = [(len(there), samples.positions(there)) for samples, there, _ in divided]
        length = next((positions.shape[1] for _, positions in parts if positions is not None), None)
        if length is None:
            return None
        start = np.arange(length)
        whole = [np.tile(start, (rows, 1)) if positions is None else positions for rows, positions in parts]
        return np.concatenate(whole)[back]

    def padding(self, indices: Int64Array) -> Int64Array:
        return self._gathered(indices, lambda samples, there, _: samples.padding(there))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{part.name}: {note}" for part in self.parts for note in part.samples.notes)

    def _divided(self, indices: Int64Array) -> tuple[list[tuple[Samples, Int64Array, Int64Array]], Int64Array]:
        """Return corpora, each with its samples' indices in it and their rows, and how to put the results in order."""
        corpora = np.searchsorted(self._starts, indices, side="right") - 1
        divided = []
        for corpus in np.unique(corpora).tolist():
            (rows,) = np.nonzero(corpora == corpus)
            divided.append((self.parts[corpus].samples, indices[rows] - self._starts[corpus], rows))
        return divided, np.argsort(np.argsort(corpora, kind="stable"), kind="stable")

    def _gathered(
        self, indices: Int64Array, read: Callable[[Samples, Int64Array, Int64Array], Int64Array]
    ) -> Int64Array:
        """Return the results of `read` for each corpus, its samples and their rows, in the order of `indices`."""
        divided, back = self._divided(indices)
        return np.concatenate([read(*each) for each in divided])[back]
