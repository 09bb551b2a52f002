"""Sampler of a data mixture: the corpus that each sample of a run comes from, and its number in that corpus.

The corpus of sample n depends on n and the weights alone. The sample is that corpus's c-th, where c counts the corpus's
samples before it. So resuming needs neither sampler state nor replay, and the number of ranks and the batch size change
nothing.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Final

import numpy as np

from threefold.data.samples import MixturePart, Samples
from threefold.errors import UserError
from threefold.random import Int64Array

LONGEST_PERIOD: Final = 65_536
"""Maximum number of samples after which a mixture repeats; weights that need more are rounded to multiples of 1/65,536.
"""


class Blend:
    """Corpus of each sample of a run, for k weighted corpora.

    Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): after any number n of
    samples, the count of each corpus differs from n · weight by at most 1 − 1 / (2k − 2), the best bound that holds for
    all weights. The assignment repeats as soon as all shares are whole numbers, so one period is stored.

    Args:
        weights: one weight above 0 per corpus; only their ratios matter.

    Attributes:
        shares: int64 [k], samples of each corpus in a period.
        period: sum of the shares.

    Raises:
        UserError: a weight is too small a part of the sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = np.array(whole_shares(weights), dtype=np.int64)
        self.period = int(self.shares.sum())
        self._corpora = _assign(self.shares.tolist())
        self._before = np.empty(self.period, dtype=np.int64)
        for corpus, share in enumerate(self.shares):
            self._before[self._corpora == corpus] = np.arange(share)

    def __call__(self, counters: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the corpus of each sample, and how many samples of that corpus come before it: two int64 [rows].

        Args:
            counters: int64 [rows], numbers of samples of the run.
        """
        periods, places = np.divmod(counters, self.period)
        corpora = self._corpora[places]
        return corpora, periods * self.shares[corpora] + self._before[places]

    def counts(self, samples: int) -> Int64Array:
        """Count how many of a run's first `samples` samples come from each corpus: int64 [k]."""
        periods, rest = divmod(samples, self.period)
        return periods * self.shares + np.bincount(self._corpora[:rest], minlength=len(self.shares))


@dataclass(frozen=True, eq=False)
class MixedSamples:
    """Samples of one split of several corpora: the first corpus's, then the second's, and so on.

    The weights of `parts` sum to 1; `blend` is the order in which a run reads them.
    """

    parts: tuple[MixturePart, ...]
    blend: Blend

    @classmethod
    def of(cls, parts: Sequence[MixturePart]) -> "MixedSamples":
        """Mix parts by their weights, of which only the ratios matter. Raises UserError if a weight is too small."""
        blend = Blend([part.weight for part in parts])
        total = sum(part.weight for part in parts)
        return cls(tuple(MixturePart(part.name, part.samples, part.weight / total) for part in parts), blend)

    def __len__(self) -> int:
        return sum(len(part.samples) for part in self.parts)

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        corpora, own_counters = self.blend(counters)
        indices = np.empty_like(counters)
        for corpus, (part, start) in enumerate(zip(self.parts, self._starts(), strict=True)):
            here = corpora == corpus
            indices[here] = start + part.samples.ordered(own_counters[here], seed)
        return indices

    def labelled(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        tokens, labels = zip(*(samples.labelled(own) for samples, own in self._divided(indices)), strict=True)
        back = self._back(indices)
        return np.concatenate(tokens)[back], np.concatenate(labels)[back]

    def documents(self, indices: Int64Array) -> Int64Array:
        parts = [samples.documents(own) for samples, own in self._divided(indices)]
        return np.concatenate(parts)[self._back(indices)]

    def epochs(self, counter: int) -> dict[str, float]:
        counts = self.blend.counts(counter).tolist()
        return {part.name: count / len(part.samples) for part, count in zip(self.parts, counts, strict=True)}

    def positions(self, indices: Int64Array) -> Int64Array | None:
        parts = [(len(own), samples.positions(own)) for samples, own in self._divided(indices)]
        length = next((positions.shape[1] for _, positions in parts if positions is not None), None)
        if length is None:
            return None
        from_start = np.arange(length)
        whole = [np.tile(from_start, (rows, 1)) if positions is None else positions for rows, positions in parts]
        return np.concatenate(whole)[self._back(indices)]

    def padding(self, indices: Int64Array) -> Int64Array:
        parts = [samples.padding(own) for samples, own in self._divided(indices)]
        return np.concatenate(parts)[self._back(indices)]

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{part.name}: {note}" for part in self.parts for note in part.samples.notes)

    def _starts(self) -> list[int]:
        return np.cumsum([0, *(len(part.samples) for part in self.parts[:-1])]).tolist()

    def _corpora(self, indices: Int64Array) -> Int64Array:
        return np.searchsorted(self._starts(), indices, side="right") - 1

    def _divided(self, indices: Int64Array) -> list[tuple[Samples, Int64Array]]:
        """Return each corpus that has some of these samples, and their indices in it."""
        corpora, starts = self._corpora(indices), self._starts()
        return [
            (self.parts[corpus].samples, indices[corpora == corpus] - starts[corpus])
            for corpus in np.unique(corpora).tolist()
        ]

    def _back(self, indices: Int64Array) -> Int64Array:
        """Return the position of each row after sorting the rows by corpus."""
        back = np.empty_like(indices)
        back[np.argsort(self._corpora(indices), kind="stable")] = np.arange(len(indices))
        return back


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return the samples of each corpus in a period: whole numbers in the ratios of the weights as written.

    If these would be too large, they are rounded so that they sum to `LONGEST_PERIOD`.

    Raises:
        UserError: a weight is too small a part of the sum.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    parts = [weight / total for weight in exact]
    period = lcm(*(part.denominator for part in parts))
    if period <= LONGEST_PERIOD:
        return [int(part * period) for part in parts]
    shares = [int(part * LONGEST_PERIOD) for part in parts]
    largest_rest_first = sorted(range(len(parts)), key=lambda i: shares[i] - parts[i] * LONGEST_PERIOD)
    for i in largest_rest_first[: LONGEST_PERIOD - sum(shares)]:
        shares[i] += 1
    for weight, share in zip(weights, shares, strict=True):
        if share == 0:
            least = float(total / LONGEST_PERIOD)
            raise UserError(
                f"data.mixture has a weight of {weight:g}, which is less than one sample in {LONGEST_PERIOD:,}; "
                f"use {least:.2g} at least, or leave it out."
            )
    return shares


def _assign(shares: list[int]) -> Int64Array:
    """Return the corpus of each sample of a period: int64 [sum of shares].

    Sample j of corpus i may come as sample n (from 1) while the count stays within the bound: not before n · weight ≥ j
    + d and not after n · weight ≤ j + 1 − d, with d = 1 / (2k − 2). Among the candidates, the one with the earliest
    deadline is chosen.
    """
    period, parts = sum(shares), 2 * len(shares) - 2
    if not parts:
        return np.zeros(period, dtype=np.int64)

    def window(corpus: int, sample: int) -> tuple[int, int]:
        unit = shares[corpus] * parts
        return -(-(sample * parts + 1) * period // unit), ((sample + 1) * parts - 1) * period // unit

    waiting = [(*window(corpus, 0), corpus, 0) for corpus in range(len(shares))]
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
