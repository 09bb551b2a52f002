"""Train, validation and test splits: which documents belong to which.

Documents are assigned to the splits by a keyed permutation of their numbers, so that a held-out split represents the
whole corpus even if its files are about different things. The key is fixed: a corpus has one validation split per
`data.split`, whatever the run's seed, and runs can be compared on it.
"""

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from threefold.errors import UserError
from threefold.random.permutation import Int64Array, KeyedPermutation, samples_at

SPLITS: Final = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Weights of train, valid and test from "949,50,1"; missing ones are 0.

    Raises:
        UserError: not one to three numbers ≥ 0 with the first above 0.
    """
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
    """How many of `documents` each split gets: by largest remainder, and at least 1 where the weight is above 0.

    Raises:
        UserError: fewer documents than splits with a weight.
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
    """The documents of split `name`, in file order, as runs of neighbours.

    Returns:
        int64 [runs, 2]: first document of a run and the one after its last. No rows if the split is empty.
    """
    counts = document_counts(documents, split)
    largest = max(counts, key=lambda key: counts[key])
    if name != largest:
        return _runs(_assigned(documents, counts, name))
    # The largest split is what the others leave, so that millions of its documents need no permuting.
    others = np.concatenate([_assigned(documents, counts, other) for other in SPLITS if other != largest])
    others.sort()
    firsts, ends = np.append(0, others + 1), np.append(others, documents)
    return np.stack([firsts, ends], axis=1)[firsts < ends]


def _assigned(documents: int, counts: dict[str, int], name: str) -> Int64Array:
    before = sum(counts[other] for other in SPLITS[: SPLITS.index(name)])
    places = np.arange(before, before + counts[name], dtype=np.int64)
    return np.sort(KeyedPermutation(documents, seed=0, purpose="split")(places))


def _runs(members: Int64Array) -> Int64Array:
    is_first = np.diff(members, prepend=-2) != 1
    is_last = np.diff(members, append=-2) != 1
    return np.stack([members[is_first], members[is_last] + 1], axis=1)


class Samples(Protocol):
    """Samples of one length S, the same on every rank."""

    def __len__(self) -> int:
        """Number of samples."""

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        """The sampler: the sample that a run reads as its n-th, for each n in `counters`: int64 [rows], a function of
        (seed, n) alone."""

    def labelled(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Inputs and labels of samples: two int64 [rows, S]; ignored labels are -100 (IGNORE_INDEX).

        Args:
            indices: int64 [rows].

        Raises:
            UserError: the files are damaged.
        """

    def documents(self, indices: Int64Array) -> Int64Array:
        """The document of each input token, from which the attention mask follows: int64 [rows, S], which never falls
        along a row."""

    def positions(self, indices: Int64Array) -> Int64Array | None:
        """The position of each input token of samples where documents under a separating attention mask count from 0:
        int64 [rows, S]; None where positions count from the start of the sample."""

    def padding(self, indices: Int64Array) -> Int64Array:
        """How many of the input tokens of samples only fill them up to their length: int64 [rows]."""

    @property
    def parts(self) -> "tuple[MixturePart, ...]":
        """The corpora that the samples come from, whose weights add up to 1."""

    def epochs(self, counter: int) -> dict[str, float]:
        """Passes over each part of a mixture, by name, after `counter` samples of a run; empty where there is none."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each thing that a user should know of how the samples were made."""


@dataclass(frozen=True)
class MixturePart:
    """One corpus of a mixture: its name, its samples, and the share of it among the samples that a run reads."""

    name: str
    samples: Samples
    weight: float


class SingleCorpus(Samples, Protocol):
    """What samples of one corpus have in common, read in a keyed order and with positions from the sample's start."""

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
    """How many training samples a run has consumed before each of its steps, from where it starts or is resumed.

    What a step reads follows from it, as the order of the samples is a permutation of this count. It is the step times
    the global batch size as long as that stays; a run may be resumed with another, and counts on.

    Attributes:
        per_step: the global batch size.
        step: updates made at the point.
        samples: consumed there.
    """

    per_step: int
    step: int = 0
    samples: int = 0

    @property
    def has_one_size(self) -> bool:
        """Whether all samples so far were consumed in batches of this size, as far as their number tells."""
        return self.samples == self.step * self.per_step

    def before(self, step: int) -> int:
        """Samples consumed before `step` (0 for the first), which is not before the point."""
        return self.samples + (step - self.step) * self.per_step

    def steps_until(self, samples: int) -> int:
        """The first step before which at least so many samples are consumed, if all batches were of this size."""
        return self.step - (self.samples - samples) // self.per_step
