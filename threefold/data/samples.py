"""Samples: the train, validation and test splits of a corpus's documents, and the order of a mixture of corpora.

Documents are assigned to the splits by a keyed permutation of their numbers, so a held-out split represents the
whole corpus. The key is fixed, whatever the run's seed, so that runs can be compared on it.

In a mixture, the corpus of sample n, and which of its samples it is, depend on n and the weights alone. So resuming
needs neither sampler state nor replay, and the number of ranks and the batch size change nothing.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from threefold.config.by_step import entries_of, steps_to_sum, sum_before, value_at
from threefold.errors import UserError
from threefold.random import Int64Array, KeyedPermutation, samples_at

SPLITS: Final = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse weights of train, valid and test such as "949,50,1"; missing ones are 0. Raises UserError if malformed."""
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


@dataclass(frozen=True)
class ConsumedSamples:
    """Number of training samples consumed before each step, counted from where a run starts or resumes.

    It determines what a step reads, because the order of samples is a permutation of this count. It is the sum of the
    global batch sizes (`per_step`, which may change by step) until a run resumes with others, at `step`, and counts on.
    """

    per_step: int
    step: int = 0
    samples: int = 0

    @property
    def has_one_size(self) -> bool:
        """Whether all batches up to now and from now on have one size."""
        return len(entries_of(self.per_step)) == 1 and self.samples == self.step * self.per_step

    def before(self, step: int) -> int:
        """Return the samples consumed before `step` (0 for the first), which must not precede the start or resume."""
        return self.samples + sum_before(self.per_step, step) - sum_before(self.per_step, self.step)

    def size(self, step: int) -> int:
        """Return the global batch size of `step` (0 for the first)."""
        size: int = value_at(self.per_step, step)
        return size

    def steps_until(self, samples: int) -> int:
        """Return the first step before which at least `samples` samples are consumed, as if counted from the start."""
        return steps_to_sum(self.per_step, samples - self.samples + sum_before(self.per_step, self.step))


LONGEST_PERIOD: Final = 65_536
"""Most samples after which a mixture repeats; weights that need more are rounded to multiples of 1/65,536."""


class Blend:
    """Corpus of each sample of a run, for k weighted corpora; only the ratios of the weights matter.

    Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): after any number n of
    samples, the count of each corpus differs from n · weight by at most 1 − 1 / (2k − 2), the best bound that holds for
    all weights. The assignment repeats as soon as all counts, int64 [k], are whole numbers, so one period is stored.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.in_period = np.array(whole_weights(weights), dtype=np.int64)
        self.period = int(self.in_period.sum())
        self._corpora = _assign(self.in_period.tolist())
        self._before = np.empty(self.period, dtype=np.int64)
        for corpus, count in enumerate(self.in_period):
            self._before[self._corpora == corpus] = np.arange(count)

    def __call__(self, counters: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the corpus of each sample of a run, and how many of that corpus come before it: two int64 [rows]."""
        periods, places = np.divmod(counters, self.period)
        corpora = self._corpora[places]
        return corpora, periods * self.in_period[corpora] + self._before[places]

    def counts(self, samples: int) -> Int64Array:
        """Count how many of a run's first `samples` samples come from each corpus: int64 [k]."""
        periods, rest = divmod(samples, self.period)
        return periods * self.in_period + np.bincount(self._corpora[:rest], minlength=len(self.in_period))


class MixedSamples(Samples):
    """Samples of several corpora, one corpus after the other, which a run reads in the order of a `Blend`."""

    def __init__(self, parts: Sequence[MixturePart]) -> None:
        self.blend = Blend([part.weight for part in parts])
        total = sum(part.weight for part in parts)
        self._parts = tuple(MixturePart(part.name, part.samples, part.weight / total) for part in parts)
        self._starts = np.cumsum([0, *(len(part.samples) for part in parts[:-1])]).tolist()

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


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the samples of each corpus in a period of at most `LONGEST_PERIOD`, in the ratios of the weights."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    parts = [weight / total for weight in exact]
    period = math.lcm(*(part.denominator for part in parts))
    if period <= LONGEST_PERIOD:
        return [int(part * period) for part in parts]
    counts = [int(part * LONGEST_PERIOD) for part in parts]
    largest_rest_first = sorted(range(len(parts)), key=lambda i: counts[i] - parts[i] * LONGEST_PERIOD)
    for i in largest_rest_first[: LONGEST_PERIOD - sum(counts)]:
        counts[i] += 1
    for weight, count in zip(weights, counts, strict=True):
        if count == 0:
            raise UserError(
                f"data.mixture has a weight of {weight:g}, which is less than one sample in {LONGEST_PERIOD:,}; "
                f"use {float(total / LONGEST_PERIOD):.2g} at least, or leave it out."
            )
    return counts


def _assign(counts: list[int]) -> Int64Array:
    """Return the corpus of each sample of a period: int64 [sum of counts].

    Sample j of corpus i may come as sample n (from 1) while the count stays within the bound: not before n · weight ≥ j
    + d and not after n · weight ≤ j + 1 − d, with d = 1 / (2k − 2). Among the candidates, the one with the earliest
    deadline is chosen.
    """
    period, parts = sum(counts), 2 * len(counts) - 2
    if not parts:
        return np.zeros(period, dtype=np.int64)

    def window(corpus: int, sample: int) -> tuple[int, int]:
        unit = counts[corpus] * parts
        return -(-(sample * parts + 1) * period // unit), ((sample + 1) * parts - 1) * period // unit

    waiting = [(*window(corpus, 0), corpus, 0) for corpus in range(len(counts))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    chosen = np.empty(period, dtype=np.int64)
    for n in range(1, period + 1):
        while waiting and waiting[0][0] <= n:
            heapq.heappush(ready, heapq.heappop(waiting)[1:])
        _, corpus, sample = heapq.heappop(ready)
        chosen[n - 1] = corpus
        heapq.heappush(waiting, (*window(corpus, sample + 1), corpus, sample + 1))
    return chosen
