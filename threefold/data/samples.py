"""Samples, and the train, validation and test splits of a corpus's documents.

Documents are assigned to the splits by a keyed permutation of their numbers, so a held-out split represents the whole
corpus even if its files differ in content. The key is fixed: a corpus has one validation split per `data.split`,
whatever the seed, so that runs can be compared on it.
"""

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from threefold.errors import UserError
from threefold.random import Int64Array, KeyedPermutation, samples_at

SPLITS: Final = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse weights of train, valid and test such as "949,50,1"; missing ones are 0. Raises UserError if malformed."""
    fields = [field.strip() for field in text.split(",")]
    try:
        weights = [float(field) for field in fields]
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
    """Divide `documents` among the splits by largest remainder; each split with a weight above 0 gets at least 1.

    Raises:
        UserError: there are fewer documents than splits with a weight.
    """
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
    """Return the documents of split `name`, in file order, as runs of consecutive numbers.

    Returns:
        int64 [runs, 2]: first document of each run, and one past its last. No rows if the split is empty.
    """
    counts = document_counts(documents, split)
    largest = max(counts, key=lambda key: counts[key])
    if name != largest:
        return _runs(_assigned(documents, counts, name))
    # The largest split is the complement of the others, so its millions of documents need no permutation.
    others = np.concatenate([_assigned(documents, counts, other) for other in SPLITS if other != largest])
    others.sort()
    firsts, ends = np.append(0, others + 1), np.append(others, documents)
    return np.stack([firsts, ends], axis=1)[firsts < ends]


def document_numbers(documents: int, split: str, name: str) -> Int64Array:
    """Return the documents of split `name`, in file order: int64 [documents of the split]."""
    runs = document_runs(documents, split, name)
    return np.concatenate([np.arange(0), *(np.arange(first, end) for first, end in runs)])


def _assigned(documents: int, counts: dict[str, int], name: str) -> Int64Array:
    before = sum(counts[other] for other in SPLITS[: SPLITS.index(name)])
    places = np.arange(before, before + counts[name], dtype=np.int64)
    return np.sort(KeyedPermutation(documents, seed=0, purpose="split")(places))


def _runs(members: Int64Array) -> Int64Array:
    is_first = np.diff(members, prepend=-2) != 1
    is_last = np.diff(members, append=-2) != 1
    return np.stack([members[is_first], members[is_last] + 1], axis=1)


class Samples(Protocol):
    """Samples of equal length S, the same on every rank."""

    def __len__(self) -> int: ...

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        """Return the sample that a run reads as its n-th, for each n in `counters`: int64 [rows].

        This is the sampler. The result depends on (seed, n) alone.
        """

    def labelled(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return inputs and labels, int64 [rows, S] each; ignored labels are -100. Raises UserError for damaged files.

        Args:
            indices: int64 [rows].
        """

    def documents(self, indices: Int64Array) -> Int64Array:
        """Return the document of each input token, for the attention mask: int64 [rows, S], non-decreasing in a row."""

    def positions(self, indices: Int64Array) -> Int64Array | None:
        """Return the position of each input token, int64 [rows, S], if positions restart with each document.

        None if they always count from the start of the sample.
        """

    def padding(self, indices: Int64Array) -> Int64Array:
        """Return the number of padding tokens of each sample: int64 [rows]."""

    @property
    def parts(self) -> "tuple[MixturePart, ...]":
        """Corpora that the samples come from, with weights that sum to 1."""

    def epochs(self, counter: int) -> dict[str, float]:
        """Return the passes over each part of a mixture after `counter` samples, by name; empty for a single corpus."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a user should know about how the samples were made."""


@dataclass(frozen=True)
class MixturePart:
    """One corpus of a mixture: its name, its samples, and its share of the samples that a run reads."""

    name: str
    samples: Samples
    weight: float


class SingleCorpus(Samples, Protocol):
    """Base of the samples of one corpus: a keyed order, and positions that count from the start of the sample."""

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        return (MixturePart("", self, 1.0),)

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        return samples_at(counters, len(self), seed)

    def epochs(self, counter: int) -> dict[str, float]:
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def positions(self, indices: Int64Array) -> Int64Array | None:
        return None


@dataclass(frozen=True)
class ConsumedSamples:
    """Number of training samples consumed before each step, counted from where a run starts or resumes.

    It determines what a step reads, because the order of samples is a permutation of this count. It is the step times
    the global batch size until a run resumes with another batch size and counts on.

    Attributes:
        per_step: global batch size.
        step: updates made at the start or resume.
        samples: samples consumed by then.
    """

    per_step: int
    step: int = 0
    samples: int = 0

    @property
    def has_one_size(self) -> bool:
        """Whether the count is consistent with batches of this size from the beginning."""
        return self.samples == self.step * self.per_step

    def before(self, step: int) -> int:
        """Return the samples consumed before `step` (0 for the first), which must not precede the start or resume."""
        return self.samples + (step - self.step) * self.per_step

    def steps_until(self, samples: int) -> int:
        """Return the first step before which at least `samples` samples are consumed, if all batches have this size."""
        return self.step - (self.samples - samples) // self.per_step
